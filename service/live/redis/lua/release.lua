-- Releases: {{token, number of its stage}, …}, no token twice.

local answered = unfit()
if answered then return answered end
local ended = 0
for _, asked in ipairs(cmsgpack.unpack(ARGV[3])) do
  local lease = lease_of(asked[1])
  if lease and not lease.reason then
    lease.token = asked[1]
    finish(stage(asked[2]), lease, 'released')
    ended = ended + 1
  end
end
return answer('ok', ended)
