-- The weights of a stage's ranges, as one column.

local refused = check_state()
if refused then return refused end
return {reply('ok'), call('GET', stage(1).keys.weights) or ''}
