-- Installs the next layout of a frozen job: {channel, meta fields, removed stage names,
-- {{fields of state, idle, notes, waiting, facts and marks, view name, view}, …}, {{fence, runs, held}, …},
-- {dirty fields}}; ARGV[4 …]: weights, tree, owners and moments of each stage. Leases without runs end.
-- KEYS after those of the stages: keys of stages that go.

local refused = check_state()
if refused then return refused end
local channel, meta, removed, stages, leases, dirty = unpack(cmsgpack.unpack(ARGV[3]))

for k = JOB_KEYS + 1, #KEYS do call('DEL', KEYS[k]) end
for _, name in ipairs(removed) do call('HDEL', VIEWS, name) end
for k, entry in ipairs(stages) do
  local st = stage(k)
  fill(st.keys.state, entry[1])
  fill(st.keys.idle, entry[2])
  fill(st.keys.notes, entry[3])
  fill(st.keys.waiting, entry[4])
  fill(st.keys.facts, entry[5])
  fill(st.keys.marks, entry[6])
  local returned = call('HGET', LEASES, 'q' .. entry[7])
  if returned then
    -- Its indices are those of the former layout.
    call('HSET', LEASES, 'q' .. entry[7], string.sub(returned, 1, 8) .. cmsgpack.pack({EVERY}))
  end
  if not publish_view(entry[7], entry[8]) then call('HSETNX', VIEWS, entry[7], entry[8]) end
  local base = 4 * k
  if #ARGV[base] > 0 then
    call('SET', st.keys.weights, ARGV[base])
    call('SET', st.keys.tree, ARGV[base + 1])
    call('SET', st.keys.owners, ARGV[base + 2])
    call('SET', st.keys.moments, ARGV[base + 3])
  end
end
for _, entry in ipairs(leases) do
  local lease = lease_at(entry[1])
  if lease and entry[3] == 0 then
    forget(lease, lease.reason or 'superseded')
  elseif lease then
    local fence = text(entry[1])
    call('HSET', LEASES, 'm' .. fence, cmsgpack.pack(entry[2]), 'n' .. fence, entry[3])
  end
end
-- Chunks of the former layouts may be behind the end of the next ones, which are dirty as a whole.
local changed = {}
for _, name in ipairs(removed) do changed[name] = true end
for _, entry in ipairs(stages) do changed[entry[7]] = true end
for _, field in ipairs(call('HKEYS', DIRTY)) do
  if changed[string.match(field, '^(.*):%d+$')] then call('HDEL', DIRTY, field) end
end
local stamp = note_change()
for _, field in ipairs(dirty) do call('HSET', DIRTY, field, stamp) end
for k = 1, #stages do
  local key = stage(k).keys.state
  local ending = call('HGET', key, 'ending')
  if ending then
    -- Chunks of the former layout, with lower stamps, may still be noted as saved.
    ending = cmsgpack.unpack(ending)
    for _, entry in ipairs(ending) do entry[2] = stamp end
    call('HSET', key, 'ending', cmsgpack.pack(ending))
  end
end
call('HSET', META, unpack(meta))
call('PUBLISH', channel, cmsgpack.pack({}))
return reply('ok')
