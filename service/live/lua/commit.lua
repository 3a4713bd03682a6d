-- A commit: {run, epoch, {observed input or false, by stage}}. For all stages or for none.

local answered = unfit()
if answered then return answered end
local run, epoch, observed = unpack(cmsgpack.unpack(ARGV[3]))
local stages, fresh = {}, {}
for k = 1, #observed do
  local st = load(stage(k))
  stages[k] = st
  if run ~= st.run then return answer('stale-run', k, st.run) end
  if st.epoch ~= '' and epoch < st.epoch then return answer('stale-epoch', k, st.epoch) end
  if epoch ~= st.epoch then
    local published = view(st)
    if observed[k] and observed[k] > published.input then
      return answer('input-ahead', k, published.all)
    end
    local blocks = cmsgpack.unpack(call('HGET', st.E, epoch) or cmsgpack.pack({}))
    local waiting = {}
    for b, block in ipairs(blocks) do
      waiting[b] = cmsgpack.unpack(call('HGET', st.E, epoch .. ':' .. block) or cmsgpack.pack({}))
      for _, entry in ipairs(waiting[b]) do
        if entry[3] and not observed[k] then return answer('uncapped', k) end
      end
    end
    fresh[k] = {blocks, waiting}
  end
end

-- Everything is checked: from here on nothing can fail, so no epoch is half committed.
local applied, unrecorded = {}, {}
for k, st in ipairs(stages) do
  applied[k] = 0
  if fresh[k] then
    local blocks, waiting = fresh[k][1], fresh[k][2]
    for b, block in ipairs(blocks) do
      local at, said, idle = {}, {}, {}
      local any_idle = false
      for i, entry in ipairs(waiting[b]) do
        local index, promise = entry[1], entry[2]
        at[i] = index - BLOCK * block + 1
        said[i] = observed[k] and math.min(promise, observed[k]) or promise
        -- A promise stays true whoever holds the range now. The word "idle" does not: the next worker
        -- may have seen data, so it counts only under a lease that is still current.
        idle[i] = false
        if entry[4] and call('GETRANGE', st.O, 8 * index, 8 * index + 7) == struct.pack('<d', entry[5]) then
          local lease = lease_at(entry[5])
          idle[i] = lease ~= nil and not lease.reason
        end
        any_idle = any_idle or idle[i]
      end
      say(st, block, 1, at, said, any_idle and idle or nil, {})
      applied[k] = applied[k] + #said
    end
    settle(st)
    -- Reports of earlier epochs that were never committed go too: they promise less than these.
    drop_waiting(st, epoch)
    call('HSET', st.S, 'epoch', epoch)
  end
  if call('HGET', st.S, 'recorded') ~= epoch then unrecorded[#unrecorded + 1] = k end
end
return answer('ok', call('HGET', META, 'incarnation'), applied, unrecorded)
