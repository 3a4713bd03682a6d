-- Removes the job unless it has a later generation: {channel, generation, the expected head}.

local channel, generation, expected = unpack(cmsgpack.unpack(ARGV[3]))
local found = call('HMGET', META, 'server', 'incarnation', 'at', 'generation')
if not found[1] then return cmsgpack.pack({-1, 'ok'}) end
if tonumber(found[4]) > generation then return cmsgpack.pack({-1, 'ok'}) end
if found[1] .. '|' .. found[2] .. '|' .. found[3] ~= expected then return cmsgpack.pack({-1, 'changed'}) end
for k = 1, #KEYS do call('DEL', KEYS[k]) end
call('PUBLISH', channel, cmsgpack.pack({}))
return cmsgpack.pack({-1, 'ok'})
