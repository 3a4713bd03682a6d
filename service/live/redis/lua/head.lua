-- The job's position, if its state can be trusted.

local head = call('HMGET', META, 'server', 'incarnation', 'generation', 'layout_version', 'revision', 'last_run')
if head[1] ~= ARGV[1] then return cmsgpack.pack({-1, 'lost'}) end
check_keys()
return reply('ok', unpack(head, 2, 6))
