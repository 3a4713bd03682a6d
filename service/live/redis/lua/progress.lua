-- The run of a stage, and its last epoch of which the ledger has the commit (empty: there is none).

local refused = check_state()
if refused then return refused end
local st = load(stage(1))
return reply('ok', st.run, call('HGET', st.keys.state, 'recorded') or lost())
