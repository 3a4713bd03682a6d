-- What is published of the job, and how the ranges of these stages are: {names, agreements too}.

local answered = unfit()
if answered then return answered end
local names, agreements = unpack(cmsgpack.unpack(ARGV[3]))
if agreements and call('ZCOUNT', DEADLINES, '-inf', NOW) > 0 then return answer('due') end
local censuses, lows = {}, {}
for k = 1, #names do
  local st = stage(k)
  local counts = call('HMGET', st.keys.state, 'n', 'promised', 'idle', 'final', 'leased')
  if not counts[1] then lost() end
  for i, value in ipairs(counts) do counts[i] = tonumber(value) end
  censuses[k] = counts
  if agreements then lows[k] = counts[1] > 0 and lowest(st) or false end
end
local meta = call('HMGET', META, 'incarnation', 'revision')
local raw, views = call('HGETALL', VIEWS), {}
for i = 1, #raw, 2 do views[#views + 1] = {raw[i], shown(raw[i + 1])} end
return answer('ok', meta[1], meta[2], views, censuses, lows)
