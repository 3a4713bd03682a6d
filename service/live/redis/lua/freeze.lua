-- Stops every step on the job until its next layout is in: {incarnation}. What is read after that cannot change.

local refused = check_state()
if refused then return refused end
call('HSET', META, 'at', '!' .. ARGV[2])
return reply('ok')
