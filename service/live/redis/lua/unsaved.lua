-- Promises that changed since they were saved: {{stage number, chunk}, …}, the chunks to return; if there are
-- none, the names of the dirty chunks are returned.

local refused = check_state()
if refused then return refused end
local wanted = cmsgpack.unpack(ARGV[3])
if #wanted == 0 then return reply('ok', call('HGETALL', DIRTY)) end
local heads, raws = {}, {}
for n, entry in ipairs(wanted) do
  local st = load(stage(entry[1]))
  local first = CHUNK * entry[2]
  local raw = call('GETRANGE', st.keys.weights, 8 * first, 8 * (first + CHUNK) - 1)
  if #raw ~= 8 * math.min(CHUNK, st.n - first) then lost() end
  local stamp = call('HGET', DIRTY, st.name .. ':' .. entry[2]) or false
  local idle = {}
  if st.source and st.idle_before > 0 then
    local fields = call('HGETALL', st.keys.idle)
    for i = 1, #fields, 2 do
      local index = tonumber(fields[i])
      if math.floor(index / CHUNK) == entry[2] then
        idle[#idle + 1] = {index - first, (struct.unpack('<d', fields[i + 1]))}
      end
    end
  end
  heads[n] = {stamp, idle, call('HGET', st.keys.state, 'since')}
  raws[n] = raw
end
return {reply('ok', heads, call('HGET', META, 'incarnation')), unpack(raws)}
