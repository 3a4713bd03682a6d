-- Renewals: {{token, number of its stage, or 0 if it is unknown}, …}.

local refused = check_state()
if refused then return refused end
local results = {}
for n, entry in ipairs(cmsgpack.unpack(ARGV[3])) do
  local lease = entry[2] > 0 and lease_of(entry[1]) or nil
  if not lease then
    results[n] = {'unknown'}
  elseif lease.reason then
    results[n] = {lease.reason}
  else
    set_deadline(text(lease.fence), lease.ttl)
    local runs = still_owned(load(stage(entry[2])), lease.fence, members(lease.fence))
    results[n] = {'ok', lease.ttl, lease.stage, runs}
  end
end
return reply('ok', results)
