-- Renewals: {{token, number of its stage, or 0 if it is unknown}, …}.

local answered = unfit()
if answered then return answered end
local results = {}
for n, asked in ipairs(cmsgpack.unpack(ARGV[3])) do
  local lease = asked[2] > 0 and lease_of(asked[1]) or nil
  if not lease then
    results[n] = {'unknown'}
  elseif lease.reason then
    results[n] = {lease.reason}
  else
    call('ZADD', DEADLINES, NOW + lease.ttl, text(lease.fence))
    local runs = owned(load(stage(asked[2])), lease.fence, members(lease.fence))
    results[n] = {'ok', lease.ttl, lease.stage, runs}
  end
end
return answer('ok', results)
