-- A commit: {run, epoch, {observed input or false, by stage}, {after how long quiet shards are idle or false,
-- by stage}, {what no range may promise more than or false, by stage}, {holds as one text or false, by stage},
-- {late rows that no report counts, by stage}, {corrections, by stage}, age of its evidence}.
-- For all stages or for none.

local refused = check_state()
if refused then return refused end
local run, epoch, observed, idle_after, caps, kept, late, corrections, age = unpack(cmsgpack.unpack(ARGV[3]))
local stages, fresh = {}, {}
for k = 1, #observed do
  local st = load(stage(k))
  stages[k] = st
  if not is_of_run(run, st.run) then return reply('stale-run', k, st.run) end
  local admitted = admission(epoch, st.epoch)
  if admitted == 'stale' then return reply('stale-epoch', k, st.epoch) end
  if admitted == 'fresh' then
    local published = view(st)
    if not may_observe(observed[k], published.input) then
      return reply('input-ahead', k, published.all)
    end
    local blocks, waiting = waits_for(st, epoch) and waiting_blocks(st, epoch) or {}, {}
    for b, block in ipairs(blocks) do
      waiting[b] = waiting_in(st, epoch, block)
      for _, entry in ipairs(waiting[b]) do
        if lacks_cap(observed[k], entry[3]) then return reply('uncapped', k) end
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
    note_change()
    local blocks, waiting = fresh[k][1], fresh[k][2]
    for b, block in ipairs(blocks) do
      local at, promises, idle = {}, {}, {}
      local any_idle = false
      for i, entry in ipairs(waiting[b]) do
        local index, promise = entry[1], entry[2]
        at[i] = index - BLOCK * block + 1
        promises[i] = promise_at_commit(promise, caps[k])
        idle[i] = false
        if entry[4] then
          local owner = call('GETRANGE', st.keys.owners, 8 * index, 8 * index + 7)
          local lease = lease_at(entry[5])
          local is_current_lease = lease ~= nil and not lease.reason
          idle[i] = idle_at_commit(true, owner == struct.pack('<d', entry[5]), is_current_lease)
        end
        local facts = entry[6] and call('HGET', st.keys.waiting, facts_field(epoch, index))
        idle[i] = idle[i] or (not entry[7] and remains_idle(st, index, facts))
        any_idle = any_idle or idle[i]
        call('SETRANGE', st.keys.moments, offset_of(st, REPORTED_AT, index), struct.pack('<d', NOW))
        if entry[6] or entry[7] or has_facts(st) then
          keep_facts(st, index, facts, entry[7])
          st.has_facts = true
        end
      end
      apply(st, block, 1, at, promises, any_idle and idle or nil, {})
      applied[k] = applied[k] + #promises
    end
    write_totals(st)
    -- Reports of earlier epochs that were never committed are dropped, too: they promise less than these.
    drop_waiting(st, epoch)
    local touched = {}
    for _, block in ipairs(blocks) do touched[block] = true end
    note_unfinished(st, touched)
    call('HSET', st.keys.state, 'epoch', epoch)
    add_count(st, '#late', late[k])
    add_count(st, '#corrections', corrections[k])
    if kept[k] then
      call('HSET', st.keys.marks, KEPT, kept[k])
    else
      call('HDEL', st.keys.marks, KEPT)
    end
    if idle_after[k] then
      keep_commits(st, next_commit(commits_of(st), NOW, idle_after[k], age))
    end
  else
    local series = commits_of(st)
    if series then keep_commits(st, repeat_commit(series, NOW, age)) end
  end
  if call('HGET', st.keys.state, 'recorded') ~= epoch then unrecorded[#unrecorded + 1] = k end
end
return reply('ok', call('HGET', META, 'incarnation'), applied, unrecorded)
