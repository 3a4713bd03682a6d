-- Hears what is in the ledger: {incarnation, {{field, stamp}, …}}. What has changed since then stays dirty.

local answered = unfit()
if answered then return answered end
local incarnation, saved = unpack(cmsgpack.unpack(ARGV[3]))
if call('HGET', META, 'incarnation') ~= incarnation then return answer('ok') end
for _, entry in ipairs(saved) do
  if call('HGET', DIRTY, entry[1]) == entry[2] then call('HDEL', DIRTY, entry[1]) end
end
return answer('ok')
