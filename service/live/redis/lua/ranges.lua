-- Returns single ranges: {indices, whether to read what waits for a commit}, and for each packed report
-- that one of them has its holds from: {fence, its ranges}; then the holds of the stage's last commit. After
-- that, as columns, the holds of each of those packed reports.

local refused = check_state()
if refused then return refused end
local st = load(stage(1))

-- All but the sketch of what is pending, whether there is one, and whether the range keeps something back.
local function facts_fields(raw)
  if not raw then return false end
  local values = {struct.unpack(FACTS, raw)}
  return {unpack(values, 1, 7)}
end

-- The greatest promise that a range has reported in an epoch that waits; false: none.
local function greatest_waiting(index)
  local greatest, block = false, math.floor(index / BLOCK)
  for _, epoch in ipairs(waiting_epochs(st)) do
    for _, known in ipairs(waiting_blocks(st, epoch)) do
      for _, entry in ipairs(known == block and waiting_in(st, epoch, block) or {}) do
        if entry[1] == index and (not greatest or entry[2] > greatest) then greatest = entry[2] end
      end
    end
  end
  return greatest
end

local indices, waiting = unpack(cmsgpack.unpack(ARGV[3]))
local leases, results, used_packed, columns, used = {}, {}, {}, {}, {}
local packed = {}
for k, fence in ipairs(packed_fences(st)) do
  packed[k] = {fence, cmsgpack.unpack(call('HGET', st.keys.packed, 'm' .. fence) or cmsgpack.pack({}))}
end

-- The fence of the newest packed report that speaks for a range; false: there is none.
local function said_packed(index)
  for _, entry in ipairs(packed) do
    local fence, runs = entry[1], entry[2]
    for r = 1, #runs, 2 do
      if index >= runs[r] and index < runs[r] + runs[r + 1] then
        if not used[fence] then
          used[fence] = true
          used_packed[#used_packed + 1] = {fence, runs}
          columns[#columns + 1] = call('HGET', st.keys.packed, 'h' .. fence)
        end
        return fence
      end
    end
  end
  return false
end

for n, index in ipairs(indices) do
  local weight = call('GETRANGE', st.keys.weights, 8 * index, 8 * index + 7)
  local owner = call('GETRANGE', st.keys.owners, 8 * index, 8 * index + 7)
  if #weight ~= 8 or #owner ~= 8 then lost() end
  local lease = false
  if owner ~= NOBODY then
    if leases[owner] == nil then
      local found = lease_at((struct.unpack('<d', owner)))
      leases[owner] = found and not found.reason
        and {text(found.fence), found.holder, math.max(0, found.deadline - NOW)} or false
    end
    lease = leases[owner]
  end
  local value, note = (struct.unpack('<d', weight)), call('HGET', st.keys.notes, index)
  local moments = {}
  for moment = 0, MOMENTS - 1 do
    local from = offset_of(st, moment, index)
    moments[moment + 1] = (struct.unpack('<d', call('GETRANGE', st.keys.moments, from, from + 7)))
  end
  local retired = is_retired(st, index)
  results[n] = {
    promise_of(st, index, value),
    not retired and st.idle_before > 0 and call('HEXISTS', st.keys.idle, index) == 1,
    note,
    moments,
    lease,
    has_facts(st) and facts_fields(call('HGET', st.keys.facts, index)) or false,
    waiting and greatest_waiting(index),
    retired,
    note or said_packed(index),
  }
end
return {reply('ok', results, used_packed, call('HGET', st.keys.marks, KEPT)), unpack(columns)}
