-- The ranges that a lease on this stage was granted: {token}.

local refused = check_state()
if refused then return refused end
local token = unpack(cmsgpack.unpack(ARGV[3]))
local st = load(stage(1))
local lease = lease_of(token)
if not lease or lease.stage ~= st.name then return reply('lease-lost', 'unknown') end
if is_fenced(lease.run, st.run) then return reply('stale-run', st.run, text(lease.run)) end
if lease.reason then return reply('lease-lost', lease.reason) end
return reply('ok', members(lease.fence))
