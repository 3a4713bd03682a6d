-- Shows what the ledger has taken: {channel, generation, revision, {{stage, view}, …},
-- {{stage number, epoch}, …}}.

local meta = call('HMGET', META, 'server', 'generation')
if meta[1] ~= ARGV[1] then return cmsgpack.pack({-1, 'lost'}) end
local channel, generation, revision, views, epochs = unpack(cmsgpack.unpack(ARGV[3]))
if meta[2] ~= generation then return answer('ok') end
local changed = {}
for _, entry in ipairs(views) do
  if show(entry[1], entry[2]) then changed[#changed + 1] = entry[1] end
end
show_revision(revision)
for _, entry in ipairs(epochs) do
  local S = stage(entry[1]).keys.state
  local recorded = call('HGET', S, 'recorded')
  if recorded and recorded < entry[2] then call('HSET', S, 'recorded', entry[2]) end
end
if #changed > 0 then call('PUBLISH', channel, cmsgpack.pack(changed)) end
return answer('ok')
