-- Promises that changed: {{stage number, chunk}, …} of which to show the weights; answers with what is
-- dirty if none is asked for.

local answered = unfit()
if answered then return answered end
local asked = cmsgpack.unpack(ARGV[3])
if #asked == 0 then return answer('ok', call('HGETALL', DIRTY)) end
local heads, raws = {}, {}
for n, entry in ipairs(asked) do
  local st = load(stage(entry[1]))
  local first = CHUNK * entry[2]
  local raw = call('GETRANGE', st.keys.weights, 8 * first, 8 * (first + CHUNK) - 1)
  if #raw ~= 8 * math.min(CHUNK, st.n - first) then lost() end
  local stamp = call('HGET', DIRTY, st.name .. ':' .. entry[2]) or false
  local idle = {}
  if st.idle_before > 0 then
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
return {answer('ok', heads, call('HGET', META, 'incarnation')), unpack(raws)}
