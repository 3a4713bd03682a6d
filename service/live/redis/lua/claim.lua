-- A claim: {token, runs of wanted ranges, holder, ttl, rank, run, watched}.

local refused = check_state()
if refused then return refused end
local token, runs, holder, ttl, rank, run, watched = unpack(cmsgpack.unpack(ARGV[3]))
local st = load(stage(1))
if not is_of_run(run, st.run) then return reply('stale-run', st.run) end
local lease, granted, denied = grant(st, token, runs, holder, ttl, rank, run, watched)
if not lease then return reply('conflict', denied) end
local returned = must_wait(st, function(found)
  for index in pairs(found) do
    if among(granted, index) then return true end
  end
  return false
end)
return reply('ok', text(lease.fence), granted, denied, returned)
