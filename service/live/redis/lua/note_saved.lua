-- Notes what is saved in the ledger: {incarnation, {{field, stamp, stage number, chunk}, …}}. What has changed since
-- then stays dirty.

local refused = check_state()
if refused then return refused end
local incarnation, saved = unpack(cmsgpack.unpack(ARGV[3]))
if call('HGET', META, 'incarnation') ~= incarnation then return reply('ok') end

-- Forgets the ends of retirements in a chunk that is saved as of a stamp.
local function forget_saved_ends(key, chunk, stamp)
  local ending = call('HGET', key, 'ending')
  if not ending then return end
  local left = {}
  for _, entry in ipairs(cmsgpack.unpack(ending)) do
    if math.floor(entry[1] / CHUNK) ~= chunk or entry[2] > stamp then left[#left + 1] = entry end
  end
  if #left > 0 then
    call('HSET', key, 'ending', cmsgpack.pack(left))
  else
    call('HDEL', key, 'ending')
  end
end

for _, entry in ipairs(saved) do
  local field, stamp, number, chunk = unpack(entry)
  if call('HGET', DIRTY, field) == stamp then call('HDEL', DIRTY, field) end
  forget_saved_ends(stage(number).keys.state, chunk, tonumber(stamp))
end
return reply('ok')
