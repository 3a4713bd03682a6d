-- Ends the leases on these stages that have run out: {names}. Returns how many by stage, and on which
-- other stages some have.

local refused = check_state()
if refused then return refused end
local numbers = {}
for k, name in ipairs(cmsgpack.unpack(ARGV[3])) do numbers[name] = k end
local ended, others, again = {}, {}, {}
-- At most so many at a time: all other clients of the server wait meanwhile.
for _, fence in ipairs(call('ZRANGEBYSCORE', DEADLINES, '-inf', NOW, 'LIMIT', 0, 256)) do
  local lease = lease_at(tonumber(fence))
  if not lease then
    call('ZREM', DEADLINES, fence)
  elseif numbers[lease.stage] then
    end_lease(stage(numbers[lease.stage]), lease, 'expired')
    ended[lease.stage] = (ended[lease.stage] or 0) + 1
  elseif not others[lease.stage] then
    others[lease.stage] = true
    again[#again + 1] = lease.stage
  end
end
local counts = {}
for name, count in pairs(ended) do counts[#counts + 1] = {name, count} end
return reply('ok', counts, again)
