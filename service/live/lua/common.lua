-- What all steps share. Each step is this file and one of its neighbours, run as one script.
--
-- A script is isolated, but what it has written stays when it fails: every step checks first and writes
-- last. Times and promises are doubles throughout, packed as such: each instant of the years 0001 to
-- 9999 is one exactly, and so are the two ends of time and every fence.
--
-- KEYS: six of the job, then eight for each stage that the step is about.
-- ARGV: the server that the caller believes to speak to, the layout it believes the job to have, and
-- the arguments of the step (MessagePack).

local call = redis.call
local META, VIEWS, LEASES, DEADLINES, ENDED, DIRTY =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]

local MIN, MAX = -2^63, 2^63
-- The weight of a range that is idle and not final: it counts for more than any active one, and for
-- less than the final ones, so the least weight of all says everything that an agreement needs.
local IDLE = 2^62
local BLOCK = 64
local CHUNK = 4096
local REMEMBERED = 10000
local MAX_WAITING_EPOCHS = 64
local NOBODY = struct.pack('<d', 0)

-- Read once: on some servers the time goes on within a script.
local time = call('TIME')
local NOW = time[1] * 1000 + math.floor(time[2] / 1000)

local formats = {}
local function format(count)
  local found = formats[count]
  if not found then
    found = '<' .. string.rep('d', count)
    formats[count] = found
  end
  return found
end

-- Unpacks doubles. (struct.unpack gives the position after the last one, too.)
local function doubles(raw)
  local count = #raw / 8
  if count == 0 then return {}, 0 end
  local values = {struct.unpack(format(count), raw)}
  values[count + 1] = nil
  return values, count
end

local function packed(values, first, last)
  return struct.pack(format(last - first + 1), unpack(values, first, last))
end

local function text(number)
  return string.format('%.0f', number)
end

-- ---- the job

-- A part of the state is missing: the server threw it away on its own (an eviction policy), or somebody
-- did. The rest goes too, so that whoever looks next begins afresh.
local function lost()
  call('DEL', META)
  error('LOST')
end

-- In how many milliseconds the next lease runs out, so that the caller knows when to look.
local function due_in()
  local first = call('ZRANGE', DEADLINES, 0, 0, 'WITHSCORES')
  return first[2] and math.max(0, tonumber(first[2]) - NOW) or -1
end

local function answer(...)
  return cmsgpack.pack({due_in(), ...})
end

-- Nil, if the job's state is as the caller believes; else what to answer.
-- A state that another server process wrote may have lost what was written after it: a restart or a
-- failover, whatever it kept, is a loss.
local function unfit()
  local meta = call('HMGET', META, 'server', 'at')
  if meta[1] ~= ARGV[1] then return cmsgpack.pack({-1, 'lost'}) end
  if meta[2] ~= ARGV[2] then return cmsgpack.pack({-1, 'at', meta[2]}) end
  return nil
end

-- ---- stages

local function stage(number)
  local base = 6 + 8 * (number - 1)
  return {
    S = KEYS[base + 1],
    W = KEYS[base + 2],
    T = KEYS[base + 3],
    O = KEYS[base + 4],
    A = KEYS[base + 5],
    H = KEYS[base + 6],
    E = KEYS[base + 7],
    I = KEYS[base + 8],
    minima = {},
    promised = 0,
    idle = 0,
    final = 0,
  }
end

local function load(st)
  if st.n then return st end
  local s = call('HMGET', st.S, 'n', 'source', 'run', 'epoch', 'idle', 'name')
  st.n, st.source, st.run, st.epoch = tonumber(s[1]), s[2] == '1', s[3], s[4]
  st.idle_before, st.name = tonumber(s[5]), s[6]
  if not st.n then lost() end
  return st
end

-- A view as it is answered: input, output, idle, version, revision, updated at.
local function shown(raw)
  local view = {struct.unpack('<ddBddd', raw)}
  view[7] = nil
  return view
end

local function view(st)
  local raw = call('HGET', VIEWS, st.name)
  if not raw then lost() end
  local all = shown(raw)
  return {all = all, input = all[1], output = all[2], idle = all[3] == 1}
end

-- The least weight of the stage's ranges.
local function lowest(st)
  local raw = call('GETRANGE', st.T, -8, -1)
  if #raw ~= 8 then lost() end
  return (struct.unpack('<d', raw))
end

local function is_ahead(st, published)
  local low = lowest(st)
  local is_idle = low == IDLE
  if not is_idle and low > published.output then return true end
  return st.source and is_idle ~= published.idle
end

-- Carries the new minima of blocks up the tree, level by level. Each node is the least of its 64 children;
-- level 1 stands over the weights themselves, the last level is one node.
local function lift(st)
  local minima = st.minima
  local size, offset = math.ceil(st.n / BLOCK), 0
  while next(minima) do
    local nodes, parents = {}, {}
    for node in pairs(minima) do nodes[#nodes + 1] = node end
    table.sort(nodes)
    local i = 1
    while i <= #nodes do
      local first, values = nodes[i], {minima[nodes[i]]}
      while nodes[i + 1] == nodes[i] + 1 and #values < 4096 do
        i = i + 1
        values[#values + 1] = minima[nodes[i]]
      end
      call('SETRANGE', st.T, 8 * (offset + first), packed(values, 1, #values))
      i = i + 1
    end
    if size == 1 then break end
    for _, node in ipairs(nodes) do
      local parent = math.floor(node / BLOCK)
      if not parents[parent] then
        local from = BLOCK * parent
        local to = math.min(from + BLOCK, size) - 1
        local children, count = doubles(call('GETRANGE', st.T, 8 * (offset + from), 8 * (offset + to) + 7))
        if count ~= to - from + 1 then lost() end
        local least = children[1]
        for c = 2, count do
          if children[c] < least then least = children[c] end
        end
        parents[parent] = least
      end
    end
    offset, size, minima = offset + size, math.ceil(size / BLOCK), parents
  end
  st.minima = {}
end

local function note_changed(st, first, last)
  if not st.stamp then st.stamp = call('HINCRBY', META, 'stamp', 1) end
  for chunk = math.floor(first / CHUNK), math.floor(last / CHUNK) do
    call('HSET', DIRTY, st.name .. ':' .. chunk, st.stamp)
  end
end

local function promise_of(st, index, weight)
  if weight ~= IDLE then return weight end
  local raw = call('HGET', st.I, index)
  if not raw then lost() end
  return (struct.unpack('<d', raw))
end

-- Takes one word where idleness is in play, before or after; returns promise and weight now.
local function word(st, index, weight, said, idle)
  local earlier = promise_of(st, index, weight)
  local now = said > earlier and said or earlier
  local new = (idle and now ~= MAX) and IDLE or now
  if new == IDLE then
    call('HSET', st.I, index, struct.pack('<d', now))
    if weight ~= IDLE then st.idle = st.idle + 1 end
  elseif weight == IDLE then
    call('HDEL', st.I, index)
    st.idle = st.idle - 1
  end
  return earlier, now, new
end

-- Takes a word from ranges within the span of `blocks` blocks that begins with block `first`: `said[k]` from
-- the range at position `at[k]` of the span, or `at + k` if `at` is a number (positions count from 1 on, in
-- any order; false: not said). A promise joins the earlier one; idleness is as said last. Appends to
-- `behind` the indices whose earlier promise was the greater.
local function say(st, first, blocks, at, said, idle, behind)
  local start = BLOCK * first
  local count = math.min(BLOCK * blocks, st.n - start)
  local weights = doubles(call('GETRANGE', st.W, 8 * start, 8 * (start + count) - 1))
  if #weights ~= count then lost() end
  local offset = type(at) == 'number' and at
  -- First and last position with another weight now, and with another promise.
  local low, high, raised_low, raised_high = count + 1, 0, count + 1, 0
  if not idle and st.idle_before + st.idle == 0 then
    -- Nobody is idle, before or after: weights are promises. The loop that runs for each range of each
    -- report, so it does no more than it must.
    for k = 1, #said do
      local p = said[k]
      if p then
        local i = offset and offset + k or at[k]
        local weight = weights[i]
        if p > weight then
          weights[i] = p
          if weight == MIN then st.promised = st.promised + 1 end
          if p == MAX then st.final = st.final + 1 end
          if i < low then low = i end
          if i > high then high = i end
        elseif p < weight and p > MIN then
          behind[#behind + 1] = start + i - 1
        end
      end
    end
    raised_low, raised_high = low, high
  else
    for k = 1, #said do
      local p = said[k]
      if p then
        local i = offset and offset + k or at[k]
        local earlier, now, new = word(st, start + i - 1, weights[i], p, idle and idle[k])
        if p < earlier and p > MIN then behind[#behind + 1] = start + i - 1 end
        if now ~= earlier then
          if earlier == MIN then st.promised = st.promised + 1 end
          if now == MAX then st.final = st.final + 1 end
          raised_low, raised_high = math.min(raised_low, i), math.max(raised_high, i)
        end
        if new ~= weights[i] then
          weights[i] = new
          low, high = math.min(low, i), math.max(high, i)
        end
      end
    end
  end
  if raised_high > 0 then note_changed(st, start + raised_low - 1, start + raised_high - 1) end
  if high == 0 then return end
  call('SETRANGE', st.W, 8 * (start + low - 1), packed(weights, low, high))
  for b = math.floor((low - 1) / BLOCK), math.floor((high - 1) / BLOCK) do
    local least = MAX
    for i = BLOCK * b + 1, math.min(BLOCK * (b + 1), count) do
      if weights[i] < least then least = weights[i] end
    end
    st.minima[first + b] = least
  end
end

-- Writes down what follows from the words that were said: tree and counts. To be called after the last.
local function settle(st)
  lift(st)
  for _, name in ipairs({'promised', 'idle', 'final'}) do
    if st[name] ~= 0 then call('HINCRBY', st.S, name, st[name]) end
  end
  st.idle_before = st.idle_before + st.idle
  st.promised, st.idle, st.final = 0, 0, 0
end

-- A shard that was idle under a lease that is over may have data that its next worker has yet to see.
local function lapse_where(st, owner)
  load(st)
  if st.idle_before == 0 then return end
  for _, field in ipairs(call('HKEYS', st.I)) do
    local index = tonumber(field)
    if call('GETRANGE', st.O, 8 * index, 8 * index + 7) == owner then
      local block = math.floor(index / BLOCK)
      say(st, block, 1, {index - BLOCK * block + 1}, {MIN}, {false}, {})
    end
  end
  settle(st)
end

-- ---- leases

-- A token's record: nil if unknown; with `reason` if it is over.
local function lease_of(token)
  local raw = call('HGET', LEASES, 't' .. token)
  if not raw then return nil end
  if string.sub(raw, 1, 1) == 'x' then
    local over = cmsgpack.unpack(string.sub(raw, 2))
    return {reason = over[1], stage = over[2], run = over[3]}
  end
  local r = cmsgpack.unpack(raw)
  local lease = {fence = r[1], stage = r[2], holder = r[3], rank = r[4], ttl = r[5], run = r[6]}
  lease.deadline = tonumber(call('ZSCORE', DEADLINES, text(lease.fence)) or 0)
  -- At its deadline it is over.
  if lease.deadline <= NOW then lease.reason = 'expired' end
  return lease
end

local function lease_at(fence)
  local token = call('HGET', LEASES, 'f' .. text(fence))
  if not token then return nil end
  local lease = lease_of(token)
  if lease then lease.token = token end
  return lease
end

-- Forgets a lease that owns nothing any more; its reason is remembered for a while.
local function forget(lease, reason)
  local f = text(lease.fence)
  call('HSET', LEASES, 't' .. lease.token, 'x' .. cmsgpack.pack({reason, lease.stage, lease.run}))
  call('HDEL', LEASES, 'f' .. f, 'm' .. f, 'n' .. f)
  call('ZREM', DEADLINES, f)
  if call('RPUSH', ENDED, lease.token) > REMEMBERED then
    call('HDEL', LEASES, 't' .. call('LPOP', ENDED))
  end
end

local STEP = 4096

-- Calls `use(start, raw)` for the owners of the ranges in `runs` (start, count, start, count …), a piece at
-- a time; `raw` holds eight bytes for each.
local function each_owner(st, runs, use)
  for r = 1, #runs, 2 do
    local start, left = runs[r], runs[r + 1]
    while left > 0 do
      local count = math.min(left, STEP)
      local raw = call('GETRANGE', st.O, 8 * start, 8 * (start + count) - 1)
      if #raw ~= 8 * count then lost() end
      use(start, raw, count)
      start, left = start + count, left - count
    end
  end
end

-- Appends a range to runs, joined to the last one where it follows.
local function append(runs, start, count)
  local size = #runs
  if size > 0 and runs[size - 1] + runs[size] == start then
    runs[size] = runs[size] + count
  else
    runs[size + 1], runs[size + 2] = start, count
  end
end

-- Those of `runs` that a lease is still on, and how many ranges they are.
local function owned(st, fence, runs)
  local mine, left, total = struct.pack('<d', fence), {}, 0
  each_owner(st, runs, function(start, raw, count)
    if raw == string.rep(mine, count) then
      append(left, start, count)
      total = total + count
      return
    end
    for i = 0, count - 1 do
      if string.sub(raw, 8 * i + 1, 8 * i + 8) == mine then
        append(left, start + i, 1)
        total = total + 1
      end
    end
  end)
  return left, total
end

local function own(st, runs, owner)
  for r = 1, #runs, 2 do
    local start, left = runs[r], runs[r + 1]
    while left > 0 do
      local count = math.min(left, STEP)
      call('SETRANGE', st.O, 8 * start, string.rep(owner, count))
      start, left = start + count, left - count
    end
  end
end

local function members(fence)
  local raw = call('HGET', LEASES, 'm' .. text(fence))
  return raw and cmsgpack.unpack(raw) or {}
end

-- Ends a lease: its ranges are free, and what was idle under it is waited for again.
local function finish(st, lease, reason)
  lapse_where(st, struct.pack('<d', lease.fence))
  local runs, total = owned(st, lease.fence, members(lease.fence))
  own(st, runs, NOBODY)
  if total > 0 then call('HINCRBY', st.S, 'leased', -total) end
  forget(lease, reason)
end

-- ---- waiting reports

local function waiting_epochs(st)
  local raw = call('HGET', st.S, 'waiting')
  return raw and cmsgpack.unpack(raw) or {}
end

-- Drops what waits for epochs up to this one (nil: for any).
local function drop_waiting(st, upto)
  local kept = {}
  for _, epoch in ipairs(waiting_epochs(st)) do
    if upto and epoch > upto then
      kept[#kept + 1] = epoch
    else
      local blocks = cmsgpack.unpack(call('HGET', st.E, epoch) or cmsgpack.pack({}))
      for _, block in ipairs(blocks) do call('HDEL', st.E, epoch .. ':' .. block) end
      call('HDEL', st.E, epoch)
    end
  end
  if #kept > 0 then
    call('HSET', st.S, 'waiting', cmsgpack.pack(kept))
  else
    call('HDEL', st.S, 'waiting')
  end
end

local function open_run(st, run)
  load(st)
  if tonumber(run) <= tonumber(st.run) then return end
  call('HSET', st.S, 'run', run)
  drop_waiting(st)
  for _, f in ipairs(call('ZRANGE', DEADLINES, 0, -1)) do
    local lease = lease_at(tonumber(f))
    if lease and lease.stage == st.name and lease.run < tonumber(run) then
      finish(st, lease, 'superseded')
    end
  end
end

-- ---- publishing

-- Shows a view unless a newer one is shown already.
local function show(name, raw)
  local current = call('HGET', VIEWS, name)
  if not current then return false end
  if shown(raw)[4] <= shown(current)[4] then return false end
  call('HSET', VIEWS, name, raw)
  return true
end

local function show_revision(revision)
  if tonumber(call('HGET', META, 'revision')) < tonumber(revision) then
    call('HSET', META, 'revision', revision)
  end
end
