-- Takes over what is newer in the ledger: {channel, revision, last run, {{stage, run, view, end}, …}}.

local refused = check_state()
if refused then return refused end
local channel, revision, last_run, stages = unpack(cmsgpack.unpack(ARGV[3]))
local changed = {}
for k, entry in ipairs(stages) do
  local st = stage(k)
  open_run(st, entry[2])
  if entry[4] ~= '' then end_run(st, entry[2], entry[4]) end
  if publish_view(entry[1], entry[3]) then changed[#changed + 1] = entry[1] end
end
publish_revision(revision)
if tonumber(call('HGET', META, 'last_run')) < tonumber(last_run) then
  call('HSET', META, 'last_run', last_run)
end
if #changed > 0 then
  note_change()
  call('PUBLISH', channel, cmsgpack.pack(changed))
end
return reply('ok')
