-- Joins soft values with those that were shown before: {{{name, value}, …}, …}, by stage. Returns all of
-- these stages' marks.

local refused = check_state()
if refused then return refused end
local joined = {}
for k, marks in ipairs(cmsgpack.unpack(ARGV[3])) do
  local key = stage(k).keys.marks
  for _, mark in ipairs(marks) do
    local shown = call('HGET', key, mark[1])
    if not shown or mark[2] > tonumber(shown) then
      note_change()
      call('HSET', key, mark[1], text(mark[2]))
    end
  end
  local fields, kept = call('HGETALL', key), {}
  for i = 1, #fields, 2 do
    if fields[i] ~= COMMITS and fields[i] ~= KEPT then kept[#kept + 1] = {fields[i], tonumber(fields[i + 1])} end
  end
  joined[k] = kept
end
return reply('ok', joined)
