-- Publishes what the ledger has recorded: {channel, generation, revision, {{stage, view}, …},
-- {{stage number, epoch}, …}}.

local meta = call('HMGET', META, 'server', 'generation')
if meta[1] ~= ARGV[1] then return cmsgpack.pack({-1, 'lost'}) end
check_keys()
local channel, generation, revision, views, epochs = unpack(cmsgpack.unpack(ARGV[3]))
if meta[2] ~= generation then return reply('ok') end
local changed = {}
for _, entry in ipairs(views) do
  if publish_view(entry[1], entry[2]) then changed[#changed + 1] = entry[1] end
end
publish_revision(revision)
for _, entry in ipairs(epochs) do
  local state = stage(entry[1]).keys.state
  local recorded = call('HGET', state, 'recorded')
  if recorded and recorded < entry[2] then call('HSET', state, 'recorded', entry[2]) end
end
if #changed > 0 then
  note_change()
  call('PUBLISH', channel, cmsgpack.pack(changed))
end
return reply('ok')
