-- Ends the leases on these stages that have run out: {names}. Answers how many by stage, and on which
-- other stages some have.

local answered = unfit()
if answered then return answered end
local numbers = {}
for k, name in ipairs(cmsgpack.unpack(ARGV[3])) do numbers[name] = k end
local ended, others, again = {}, {}, {}
-- A bounded piece of work at a time: others wait for the server meanwhile.
for _, f in ipairs(call('ZRANGEBYSCORE', DEADLINES, '-inf', NOW, 'LIMIT', 0, 256)) do
  local lease = lease_at(tonumber(f))
  if not lease then
    call('ZREM', DEADLINES, f)
  elseif numbers[lease.stage] then
    finish(stage(numbers[lease.stage]), lease, 'expired')
    ended[lease.stage] = (ended[lease.stage] or 0) + 1
  elseif not others[lease.stage] then
    others[lease.stage] = true
    again[#again + 1] = lease.stage
  end
end
local counts = {}
for name, count in pairs(ended) do counts[#counts + 1] = {name, count} end
return answer('ok', counts, again)
