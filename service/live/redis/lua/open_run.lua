-- A new run of these stages.

local answered = unfit()
if answered then return answered end
local run = cmsgpack.unpack(ARGV[3])
for k = 1, (#KEYS - JOB_KEYS) / STAGE_KEYS do open_run(stage(k), run) end
if tonumber(call('HGET', META, 'last_run')) < tonumber(run) then call('HSET', META, 'last_run', run) end
return answer('ok')
