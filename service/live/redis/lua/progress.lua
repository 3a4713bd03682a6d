-- The run of a stage, and its last committed epoch (empty: there is none).

local refused = check_state()
if refused then return refused end
local st = load(stage(1))
return reply('ok', st.run, st.epoch)
