-- Opens a run of these stages.

local refused = check_state()
if refused then return refused end
local run = cmsgpack.unpack(ARGV[3])
for k = 1, (#KEYS - JOB_KEYS) / STAGE_KEYS do open_run(stage(k), run) end
if tonumber(call('HGET', META, 'last_run')) < tonumber(run) then call('HSET', META, 'last_run', run) end
return reply('ok')
