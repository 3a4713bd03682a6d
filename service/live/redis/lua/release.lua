-- Releases: {{token, number of its stage}, …}, no token twice.

local refused = check_state()
if refused then return refused end
local ended = 0
for _, entry in ipairs(cmsgpack.unpack(ARGV[3])) do
  local lease = lease_of(entry[1])
  if lease and not lease.reason then
    lease.token = entry[1]
    end_lease(stage(entry[2]), lease, 'released')
    ended = ended + 1
  end
end
return reply('ok', ended)
