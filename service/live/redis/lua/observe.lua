-- What the ranges of these stages have said of their work. Returns the time, then for each stage: weights,
-- moments, owners, marks (also the series of commits and the holds of the last one), idle ranges, facts, the end
-- of its run, the census, and the holders of leases that have run out (see `note_departed`).

local refused = check_state()
if refused then return refused end
local found = {reply('ok', NOW)}
for k = 1, (#KEYS - JOB_KEYS) / STAGE_KEYS do
  local st = load(stage(k))
  found[#found + 1] = call('GET', st.keys.weights) or ''
  found[#found + 1] = call('GET', st.keys.moments) or ''
  found[#found + 1] = call('GET', st.keys.owners) or ''
  found[#found + 1] = call('HGETALL', st.keys.marks)
  found[#found + 1] = call('HGETALL', st.keys.idle)
  found[#found + 1] = call('HGETALL', st.keys.facts)
  found[#found + 1] = run_end(st)
  found[#found + 1] = call('HMGET', st.keys.state, 'n', 'promised', 'idle', 'final', 'leased', 'retired')
  found[#found + 1] = call('HGET', LEASES, 'l' .. st.name) or ''
end
return found
