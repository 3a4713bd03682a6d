-- Stops every step on the job until its next layout is in: {incarnation}. What is dumped then stays so.

local answered = unfit()
if answered then return answered end
call('HSET', META, 'at', '!' .. ARGV[2])
return answer('ok')
