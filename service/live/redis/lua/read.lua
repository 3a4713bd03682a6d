-- The job's published views, and the censuses of these stages: {names, whether to read agreements, too}.

local refused = check_state()
if refused then return refused end
local names, agreements = unpack(cmsgpack.unpack(ARGV[3]))
if agreements and call('ZCOUNT', DEADLINES, '-inf', NOW) > 0 then return reply('due') end
local censuses, agreed = {}, {}
for k = 1, #names do
  local st = stage(k)
  local counts = call('HMGET', st.keys.state, 'n', 'promised', 'idle', 'final', 'leased', 'retired')
  if not counts[1] then lost() end
  for i, value in ipairs(counts) do counts[i] = tonumber(value or 0) end
  censuses[k] = counts
  if agreements then
    agreed[k] = agreement(load(st))
    agreed[k][3] = leaves_out(st.idle_before, st.retired_before, not st.source)
    local rows = call('HMGET', st.keys.facts, '#records', '#late')
    -- As text: a double would round a large count, up to one more than the ledger can keep.
    agreed[k][4], agreed[k][5] = rows[1] or '0', rows[2] or '0'
    agreed[k][6] = #returned_ranges(st) > 0
  end
end
local meta = call('HMGET', META, 'incarnation', 'revision', 'stamp')
local raw, views = call('HGETALL', VIEWS), {}
for i = 1, #raw, 2 do views[#views + 1] = {raw[i], unpack_view(raw[i + 1])} end
return reply('ok', meta[1], meta[2], meta[3], views, censuses, agreed)
