-- The whole state of one stage, of a job that is frozen: its columns, then its fields, notes, waiting reports,
-- idle ranges, facts, marks and the holds of packed reports.

local refused = check_state()
if refused then return refused end
local keys = stage(1).keys
return {
  reply('ok'),
  call('GET', keys.weights) or '',
  call('GET', keys.owners) or '',
  call('GET', keys.moments) or '',
  call('HGETALL', keys.state),
  call('HGETALL', keys.notes),
  call('HGETALL', keys.waiting),
  call('HGETALL', keys.idle),
  call('HGETALL', keys.facts),
  call('HGETALL', keys.marks),
  call('HGETALL', keys.packed),
}
