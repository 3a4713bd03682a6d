-- Ends a run of these stages: {channel, names, run, its end}.

local refused = check_state()
if refused then return refused end
local channel, names, run, ended = unpack(cmsgpack.unpack(ARGV[3]))
for k = 1, #names do end_run(stage(k), run, ended) end
call('PUBLISH', channel, cmsgpack.pack(names))
return reply('ok')
