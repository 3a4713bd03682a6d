-- Retires a range, by its index, until its next report. A range that is retired or final already stays as it is.
-- Returns whether the stage's agreement is ahead of what is published.

local refused = check_state()
if refused then return refused end
local st = load(stage(1))
local index = cmsgpack.unpack(ARGV[3])
local raw = call('GETRANGE', st.keys.weights, 8 * index, 8 * index + 7)
if #raw ~= 8 then lost() end
local weight = (struct.unpack('<d', raw))
if weight ~= MAX and not is_retired(st, index) then
  note_change()
  retire(st, index, weight)
  write_totals(st)
end
local published = view(st)
return reply('ok', is_ahead(agreement(st), published.output, published.idle))
