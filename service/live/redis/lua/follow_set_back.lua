-- Corrects the moments of a stage that are ahead of the clock, which was set back. The argument is for how long the
-- ranges that are idle by policy have been quiet.

local refused = check_state()
if refused then return refused end
local st = load(stage(1))
local after = cmsgpack.unpack(ARGV[3])
if is_void(commits_of(st), NOW) then call('HDEL', st.keys.marks, COMMITS) end

local function corrected(index, given)
  local raw = call('HGET', st.keys.idle, index)
  local is_idle = raw and mark_of(raw) == POLICY
  return after_set_back(given, NOW, is_idle and after or 0)
end

-- At most so many at a time: Lua returns no more values from one call.
local PIECE = 4096
for first = 0, st.n - 1, PIECE do
  local start, count = offset_of(st, HELD_SINCE, first), math.min(PIECE, st.n - first)
  for i, moment in ipairs((doubles(call('GETRANGE', st.keys.moments, start, start + 8 * count - 1)))) do
    local is_watched = moment >= 0
    local since = is_watched and moment or -moment - 1
    if since > NOW then
      local now = held_moment(corrected(first + i - 1, since), is_watched)
      call('SETRANGE', st.keys.moments, start + 8 * (i - 1), struct.pack('<d', now))
    end
  end
end
for _, field in ipairs(call('HKEYS', st.keys.facts)) do
  local index = tonumber(field)
  -- The others are counts.
  if index then
    local raw = call('HGET', st.keys.facts, field)
    local values = {struct.unpack(FACTS, raw)}
    if values[5] > NOW then
      values[5] = corrected(index, values[5])
      call('HSET', st.keys.facts, field, struct.pack(FACTS, unpack(values, 1, 7)) .. string.sub(raw, values[8]))
    end
  end
end
note_change()
return reply('ok')
