-- Starts a state afresh: {channel, the expected head (`Meta.identity`), keep leases known, meta fields,
-- {{state fields, view name, view, facts, end of its run, retired ranges}, …}}; ARGV[4 …]: weights, tree and moments of each stage.
-- KEYS after those of the stages: keys of stages that go.

local channel, expected, supersede, meta, stages = unpack(cmsgpack.unpack(ARGV[3]))
local found = call('HMGET', META, 'server', 'incarnation', 'at')
if (found[1] or '') .. '|' .. (found[2] or '') .. '|' .. (found[3] or '') ~= expected then
  return reply('changed')
end
if supersede then
  -- Within an incarnation, only a trustworthy state may be started afresh.
  if found[1] ~= ARGV[1] then return reply('lost') end
  for _, fence in ipairs(fences()) do
    local lease = lease_at(tonumber(fence))
    if lease then forget(lease, 'superseded') end
  end
else
  call('DEL', META, LEASES, DEADLINES, ENDED)
end
call('DEL', VIEWS, DIRTY)
fill_keys()
for k = JOB_KEYS + 1, #KEYS do call('DEL', KEYS[k]) end
call('HSET', META, 'server', ARGV[1], unpack(meta))
if supersede then note_change() end
for k, entry in ipairs(stages) do
  local st = stage(k)
  call('HSET', st.keys.state, unpack(entry[1]))
  call('HSET', VIEWS, entry[2], entry[3])
  fill(st.keys.facts, entry[4])
  fill(st.keys.idle, entry[6])
  if entry[5] ~= '' then call('HSET', LEASES, 'e' .. entry[2], entry[5]) end
  local weights = ARGV[1 + 3 * k]
  if #weights > 0 then
    call('SET', st.keys.weights, weights)
    call('SET', st.keys.tree, ARGV[2 + 3 * k])
    call('SET', st.keys.moments, ARGV[3 + 3 * k])
    -- Extended with zeros: owned by nobody.
    call('SETRANGE', st.keys.owners, #weights - 1, '\0')
  end
end
call('PUBLISH', channel, cmsgpack.pack({}))
return reply('ok')
