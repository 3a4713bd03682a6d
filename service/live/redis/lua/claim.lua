-- A claim: {runs of wanted ranges, holder, ttl, rank, run, token}.

local refused = check_state()
if refused then return refused end
local runs, holder, ttl, rank, run, token = unpack(cmsgpack.unpack(ARGV[3]))
local st = load(stage(1))
if not is_of_run(run, st.run) then return reply('stale-run', st.run) end

-- By owner (eight bytes): its lease if it keeps its ranges, false if it yields.
local keepers, gone = {[NOBODY] = false}, {[NOBODY] = true}
local function keeper(owner)
  local found = keepers[owner]
  if found == nil then
    local lease = lease_at((struct.unpack('<d', owner)))
    local yields = not lease or lease.reason or takes_over(rank, lease.rank, lease.holder == holder)
    found = not yields and lease or false
    keepers[owner], gone[owner] = found, not lease or lease.reason ~= nil
  end
  return found
end

local granted, total, freed, taken, denied, order = {}, 0, 0, {}, {}, {}
local function decide(owner, start, count)
  local lease = keeper(owner)
  if lease then
    if not denied[owner] then
      denied[owner] = {lease.holder, math.max(0, lease.deadline - NOW), {}}
      order[#order + 1] = denied[owner]
    end
    append(denied[owner][3], start, count)
    return
  end
  append(granted, start, count)
  total = total + count
  if owner == NOBODY then
    freed = freed + count
  else
    taken[owner] = (taken[owner] or 0) + count
  end
end
each_owner(st, runs, function(start, raw, count)
  local first = string.sub(raw, 1, 8)
  if consists_of(raw, first) then return decide(first, start, count) end
  for i = 0, count - 1 do decide(string.sub(raw, 8 * i + 1, 8 * i + 8), start + i, 1) end
end)
if total == 0 then return reply('conflict', order) end

local fence = call('HINCRBY', META, 'fence', 1)
local fence_text, owner = text(fence), struct.pack('<d', fence)
-- The old leases are fenced here, in the same step that grants the new one: no report can come between
-- the two.
note_leased(st, granted, gone)
set_owner(st, granted, owner)
end_idleness(st, owner)
if freed > 0 then call('HINCRBY', st.keys.state, 'leased', freed) end
for loser, count in pairs(taken) do
  local lost = (struct.unpack('<d', loser))
  local lease = lease_at(lost)
  if lease and call('HINCRBY', LEASES, 'n' .. text(lost), -count) <= 0 then
    forget(lease, lease.reason or 'superseded')
  end
end
call(
  'HSET', LEASES,
  't' .. token, cmsgpack.pack({fence, st.name, holder, rank, ttl, tonumber(run)}),
  'f' .. fence_text, token,
  'm' .. fence_text, cmsgpack.pack(granted),
  'n' .. fence_text, total
)
set_deadline(fence_text, ttl)
return reply('ok', fence_text, granted, order)
