-- Notes what is saved in the ledger: {incarnation, {{field, stamp}, …}}. What has changed since then stays dirty.

local refused = check_state()
if refused then return refused end
local incarnation, saved = unpack(cmsgpack.unpack(ARGV[3]))
if call('HGET', META, 'incarnation') ~= incarnation then return reply('ok') end
for _, entry in ipairs(saved) do
  if call('HGET', DIRTY, entry[1]) == entry[2] then call('HDEL', DIRTY, entry[1]) end
end
return reply('ok')
