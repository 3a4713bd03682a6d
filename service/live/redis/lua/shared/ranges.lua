-- Ranges: joining what they report, and the totals of their stage.

local function mark_dirty(st, first, last)
  for chunk = math.floor(first / CHUNK), math.floor(last / CHUNK) do
    call('HSET', DIRTY, st.name .. ':' .. chunk, note_change())
  end
end

local function promise_of(st, index, weight)
  if weight ~= IDLE then return weight end
  local raw = call('HGET', st.keys.idle, index)
  if not raw then lost() end
  return (struct.unpack('<d', raw))
end

-- Whether the weight of any range is not its promise, or was not before this step.
local function any_set_aside(st)
  return st.idle_before + st.idle + st.retired_before + st.retired > 0
end

local function is_retired(st, index)
  if st.retired_before + st.retired == 0 then return false end
  local entry = call('HGET', st.keys.idle, index)
  return entry and mark_of(entry) == RETIRED
end

-- Notes that a range's retirement has ended, in `ending`: {{index, stamp of the change, holder of the lease that
-- reports}, …}, until the end is saved in the ledger. At a commit, the holder is unknown: ''. A report that was
-- applied, but not answered, is sent again: without the note, the second one would be answered before the end is
-- durable.
local function note_end_of_retirement(st, index)
  local ending = st.ending and cmsgpack.unpack(st.ending) or {}
  ending[#ending + 1] = {index, note_change(), st.reporter or ''}
  st.ending = cmsgpack.pack(ending)
  call('HSET', st.keys.state, 'ending', st.ending)
  mark_dirty(st, index, index)
end

-- Reads what a report says of a range, in the order of `merge_facts`.
local function read_reported(reported)
  local oldest, records, late, backlog, has_pending, keeps_back, at = struct.unpack(REPORTED_FACTS, reported)
  return {oldest, records, late, backlog, has_pending == 1 and string.sub(reported, at), keeps_back == 1}
end

-- Whether a report says that something of its range is still to come out.
local function says_unfinished(reported)
  if not reported then return false end
  local said = read_reported(reported)
  return is_unfinished(said[6], said[4], said[1], said[5])
end

-- Whether a range that reports these facts remains idle by policy: then POLICY.
local function remains_idle(st, index, facts)
  if not facts or st.idle_before == 0 then return false end
  local raw = call('HGET', st.keys.idle, index)
  local was = raw and mark_of(raw) == POLICY
  local reported_nothing = is_quiet(read_reported(facts)) and not says_unfinished(facts)
  return stays_idle(was, reported_nothing) and POLICY or false
end

-- Stands for all ranges of a stage, among those that have returned.
local EVERY = -1

local apply
do
  -- Appends to the ranges that have returned in this step (see `awaits_revision`).
  local function append_returned(st, index)
    st.returned = st.returned or {}
    st.returned[#st.returned + 1] = index
  end

  -- Notes that a range is idle no longer, or retired. Must be called while it is counted as such.
  local function note_returned(st, index)
    if st.source then
      append_returned(st, index)
      return
    end
    local final = st.final_before + st.final + st.retired_before + st.retired
    if are_idle_together(st.n, st.idle_before + st.idle, final) then append_returned(st, EVERY) end
  end

  -- Applies what one range reports if idleness is involved, before or after; returns its earlier promise, and
  -- its promise and weight now.
  local function apply_one(st, index, weight, reported, idle)
    local earlier = promise_of(st, index, weight)
    if is_retired(st, index) then
      -- A report ends the retirement: the range holds its stage again, from its own promise on.
      note_returned(st, index)
      if not st.source then append_returned(st, index) end
      st.retired = st.retired - call('HDEL', st.keys.idle, index)
      if earlier == MIN then st.promised = st.promised - 1 end
      -- As it counts, its promise has moved.
      call('SETRANGE', st.keys.moments, offset_of(st, RAISED_AT, index), moment(1))
      note_end_of_retirement(st, index)
    end
    local now, is_idle = join_report(earlier, reported, idle)
    if is_idle and now ~= MAX then
      local by_policy = idle == POLICY and POLICY or ''
      st.idle = st.idle + call('HSET', st.keys.idle, index, struct.pack('<d', now) .. by_policy)
      -- The idleness of a key range takes nothing out of the minimum.
      return earlier, now, st.source and IDLE or now
    end
    if call('HDEL', st.keys.idle, index) == 1 then
      if now ~= MAX then note_returned(st, index) end
      st.idle = st.idle - 1
    end
    return earlier, now, now
  end

  -- Notes when promises moved last. `gaps` has the positions before and after each gap between those that did.
  local function note_raised(st, start, low, high, gaps)
    gaps[#gaps + 1] = high
    for g = 1, #gaps, 2 do
      local from, to = g == 1 and low or gaps[g - 1], gaps[g]
      call('SETRANGE', st.keys.moments, offset_of(st, RAISED_AT, start + from - 1), moment(to - from + 1))
    end
  end

  -- Applies what ranges report within the span of `blocks` blocks that begins with block `first`: `promises[k]`
  -- is of the range at position `at[k]` of the span, or `at + k` if `at` is a number (positions count from 1 on,
  -- in any order; false: nothing reported). A promise joins the earlier one; idleness is as reported last.
  -- Appends to `behind` the indices whose earlier promise was greater.
  function apply(st, first, blocks, at, promises, idle, behind)
    local start = BLOCK * first
    local count = math.min(BLOCK * blocks, st.n - start)
    local weights = doubles(call('GETRANGE', st.keys.weights, 8 * start, 8 * (start + count) - 1))
    if #weights ~= count then lost() end
    local offset = type(at) == 'number' and at
    -- First and last position with another weight now, and with another promise.
    local low, high, raised_low, raised_high = count + 1, 0, count + 1, 0
    local gaps, first_raised, last = {}, nil, nil
    if not idle and not any_set_aside(st) then
      -- No range is idle or retired, before or after: weights are promises. This loop runs for every range of every
      -- report, so `join_report` and `is_behind` are written out.
      for k = 1, #promises do
        local p = promises[k]
        if p then
          local i = offset and offset + k or at[k]
          local weight = weights[i]
          if p > weight then
            weights[i] = p
            if weight == MIN then st.promised = st.promised + 1 end
            if p == MAX then st.final = st.final + 1 end
            if i < low then low = i end
            if i > high then high = i end
            if last and i ~= last + 1 then
              local g = #gaps
              gaps[g + 1], gaps[g + 2] = last, i
            end
            first_raised, last = first_raised or i, i
          elseif p < weight and p > MIN then
            behind[#behind + 1] = start + i - 1
          end
        end
      end
      raised_low, raised_high = low, high
    else
      for k = 1, #promises do
        local p = promises[k]
        if p then
          local i = offset and offset + k or at[k]
          local earlier, now, new = apply_one(st, start + i - 1, weights[i], p, idle and idle[k])
          if is_behind(earlier, p) then behind[#behind + 1] = start + i - 1 end
          if now ~= earlier then
            if earlier == MIN then st.promised = st.promised + 1 end
            if now == MAX then st.final = st.final + 1 end
            raised_low, raised_high = math.min(raised_low, i), math.max(raised_high, i)
            if last and i ~= last + 1 then
              local g = #gaps
              gaps[g + 1], gaps[g + 2] = last, i
            end
            first_raised, last = first_raised or i, i
          end
          if new ~= weights[i] then
            weights[i] = new
            low, high = math.min(low, i), math.max(high, i)
          end
        end
      end
    end
    if raised_high > 0 then
      mark_dirty(st, start + raised_low - 1, start + raised_high - 1)
      note_raised(st, start, first_raised, last, gaps)
    end
    if high == 0 then return end
    call('SETRANGE', st.keys.weights, 8 * (start + low - 1), packed(weights, low, high))
    for b = math.floor((low - 1) / BLOCK), math.floor((high - 1) / BLOCK) do
      local least = MAX
      for i = BLOCK * b + 1, math.min(BLOCK * (b + 1), count) do
        if weights[i] < least then least = weights[i] end
      end
      st.minima[first + b] = least
    end
  end
end

-- Returns the least weight of some of a block's ranges; MAX if they are none.
local function least_of(st, first, last)
  local least = MAX
  if first > last then return least end
  local weights, count = doubles(call('GETRANGE', st.keys.weights, 8 * first, 8 * last + 7))
  if count ~= last - first + 1 then lost() end
  for i = 1, count do
    if weights[i] < least then least = weights[i] end
  end
  return least
end

-- Applies a report that its sender has joined with the promises that are there (see `joined.py`): they become
-- `promises`. A run of ranges is {first, count, which of them move (first, count, …), the least of each block's
-- part, how many more are final}. All have promised something before.
local function apply_joined(st, run, promises)
  local first, count, raised, minima, final = unpack(run)
  if #raised == 0 then return end
  for r = 1, #raised, 2 do
    call('SETRANGE', st.keys.moments, offset_of(st, RAISED_AT, raised[r]), moment(raised[r + 1]))
  end
  mark_dirty(st, raised[1], raised[#raised - 1] + raised[#raised] - 1)
  call('SETRANGE', st.keys.weights, 8 * first, promises)
  local last = first + count - 1
  local block, end_block = math.floor(first / BLOCK), math.floor(last / BLOCK)
  for b = 1, #minima do st.minima[block + b - 1] = minima[b] end
  -- The first and the last block may have other ranges, too.
  local before = least_of(st, BLOCK * block, first - 1)
  local behind = least_of(st, last + 1, math.min(BLOCK * (end_block + 1), st.n) - 1)
  st.minima[block] = math.min(st.minima[block], before)
  st.minima[end_block] = math.min(st.minima[end_block], behind)
  st.final = st.final + final
end

-- Retires a range. Its entry keeps its promise. It counts among those that have promised.
local function retire(st, index, weight)
  local promise = promise_of(st, index, weight)
  if promise == MIN then st.promised = st.promised + 1 end
  st.idle = st.idle - call('HDEL', st.keys.idle, index)
  st.retired = st.retired + call('HSET', st.keys.idle, index, struct.pack('<d', promise) .. RETIRED)
  call('SETRANGE', st.keys.weights, 8 * index, struct.pack('<d', IDLE))
  local block = math.floor(index / BLOCK)
  st.minima[block] = least_of(st, BLOCK * block, math.min(BLOCK * (block + 1), st.n) - 1)
  mark_dirty(st, index, index)
end

-- Ends the retirement of ranges that report for an epoch: `promises[k]` is of the range at position `k` of `at`
-- (false: nothing reported).
local function end_retirements(st, first, at, promises)
  if st.retired_before + st.retired == 0 then return end
  for k = 1, #promises do
    local index = BLOCK * first + (type(at) == 'number' and at + k or at[k]) - 1
    if promises[k] and is_retired(st, index) then
      local block = math.floor(index / BLOCK)
      apply(st, block, 1, {index - BLOCK * block + 1}, {MIN}, {false}, {})
    end
  end
end

-- The ranges of the stage that have returned since the last revision.
local function returned_ranges(st)
  local raw = call('HGET', LEASES, 'q' .. st.name)
  if not raw then return {} end
  local returned_at, rest = struct.unpack('<d', raw)
  if awaits_revision(returned_at, tonumber(call('HGET', META, 'revision'))) then
    return cmsgpack.unpack(string.sub(raw, rest))
  end
  call('HDEL', LEASES, 'q' .. st.name)
  return {}
end

local write_totals
do
  -- So many are kept by themselves. Of more, each range of the stage waits.
  local MOST_RETURNED = 1000

  -- Writes those that have returned in this step: among the leases, so that to lose them is to lose the state.
  local function write_returned(st)
    local indices = returned_ranges(st)
    for _, index in ipairs(st.returned) do indices[#indices + 1] = index end
    if #indices > MOST_RETURNED then indices = {EVERY} end
    local revision = tonumber(call('HGET', META, 'revision'))
    call('HSET', LEASES, 'q' .. st.name, struct.pack('<d', revision) .. cmsgpack.pack(indices))
    st.returned = nil
  end

  -- Writes the tree and the counts after calls of `apply`. Must be called after the last one.
  function write_totals(st)
    update_tree(st)
    for _, name in ipairs({'promised', 'idle', 'final'}) do
      if st[name] ~= 0 then call('HINCRBY', st.keys.state, name, st[name]) end
    end
    if st.retired ~= 0 and call('HINCRBY', st.keys.state, 'retired', st.retired) == 0 then
      call('HDEL', st.keys.state, 'retired')
    end
    if st.returned then write_returned(st) end
    st.idle_before, st.final_before = st.idle_before + st.idle, st.final_before + st.final
    st.retired_before = st.retired_before + st.retired
    st.promised, st.idle, st.final, st.retired = 0, 0, 0, 0
  end
end

-- Whether an answer to some ranges of the stage must wait for the next revision; `is_any(returned)` finds one of them
-- among the keys of a table. Must be called after `write_totals`.
local function must_wait(st, is_any)
  local indices = returned_ranges(st)
  if #indices == 0 then return false end
  local returned = {}
  for _, index in ipairs(indices) do returned[index] = true end
  return returned[EVERY] or is_any(returned)
end

-- ---- facts

-- Reads what a range has said so far, in the order of `merge_facts`.
local function read_facts(raw)
  local values = {struct.unpack(FACTS, raw)}
  local facts = {unpack(values, 1, 5)}
  facts[6] = values[6] == 1 and string.sub(raw, values[8])
  facts[7] = values[7] == 1
  return facts
end

local add_count
do
  local MAX_COUNT = '9223372036854775807'

  -- Adds to a count of a stage: '#records', '#late' or '#corrections'. Mirrors `add_count` in service/frontier/facts.py:
  -- Redis adds, since a double is not exact, and refuses a sum that is too large. The error would leave the step
  -- half applied.
  function add_count(st, name, more)
    if more <= 0 then return end
    local sum = redis.pcall('HINCRBY', st.keys.facts, name, text(more))
    if type(sum) ~= 'table' then return end
    if string.find(sum.err, 'overflow', 1, true) then
      call('HSET', st.keys.facts, name, MAX_COUNT)
    else
      -- Any other error is raised as that of each command.
      call('HINCRBY', st.keys.facts, name, text(more))
    end
  end
end

-- Merges what a range reports with what it reported before. Positions in a packed one: see `schema.py`.
-- `unfinished`: so has said an attempt at the epoch that is committed.
local function keep_facts(st, index, reported, unfinished)
  local earlier = call('HGET', st.keys.facts, index)
  if not reported and not earlier and not unfinished then return end
  local newer = reported and read_reported(reported) or {MIN, -1, 0, 0, false, false}
  newer[6] = newer[6] or unfinished or false
  local before = earlier and read_facts(earlier) or nil
  local merged = merge_facts(before, newer, NOW, NOW)
  local was = before and is_unfinished(before[7], before[4], before[3], before[6]) or false
  if is_unfinished(merged[7], merged[4], merged[3], merged[6]) ~= was then mark_dirty(st, index, index) end
  local pending = merged[6]
  merged[6], merged[7] = pending and 1 or 0, merged[7] and 1 or 0
  call('HSET', st.keys.facts, index, struct.pack(FACTS, unpack(merged)) .. (pending or ''))
  add_count(st, '#records', newer[2])
  add_count(st, '#late', newer[3])
end

-- Since when a range has been quiet; -1: it has no facts.
local function read_quiet_since(st, index)
  local raw = call('HGET', st.keys.facts, index)
  return raw and select(5, struct.unpack(FACTS, raw)) or -1
end

-- Whether the last report of a range has left something unfinished.
local function leaves_unfinished(st, index)
  local raw = call('HGET', st.keys.facts, index)
  if not raw then return false end
  local facts = read_facts(raw)
  return is_unfinished(facts[7], facts[4], facts[3], facts[6])
end

-- Notes what a report says that waits for its commit: see `note_waiting` in service/frontier/facts.py.
local function note_waiting(st, index, quiet, unfinished)
  if quiet and not unfinished then return end
  local raw = call('HGET', st.keys.facts, index) or struct.pack(FACTS, 0, -1, MIN, 0, NOW, 0, 0)
  local values = {struct.unpack(FACTS, raw)}
  if not quiet then values[5] = NOW end
  if unfinished and not leaves_unfinished(st, index) then mark_dirty(st, index, index) end
  if unfinished then values[7] = 1 end
  local pending = string.sub(raw, values[8])
  call('HSET', st.keys.facts, index, struct.pack(FACTS, unpack(values, 1, 7)) .. pending)
  st.has_facts = true
end

-- Whether any range of the stage has facts.
local function has_facts(st)
  if st.has_facts == nil then st.has_facts = call('EXISTS', st.keys.facts) == 1 end
  return st.has_facts
end

-- Ends the idleness that was reported under a lease that is over. See `join_report`. A retirement goes on.
local function end_idleness(st, owner)
  load(st)
  -- Earlier reports of the same call count, too.
  if st.idle_before + st.idle == 0 then return end
  for _, field in ipairs(call('HKEYS', st.keys.idle)) do
    local index = tonumber(field)
    local is_owned = call('GETRANGE', st.keys.owners, 8 * index, 8 * index + 7) == owner
    if is_owned and not is_retired(st, index) then
      local block = math.floor(index / BLOCK)
      apply(st, block, 1, {index - BLOCK * block + 1}, {MIN}, {false}, {})
    end
  end
  write_totals(st)
end

-- Returns the fences of the leases that have sent packed reports with holds, as text, the newest first.
local function packed_fences(st)
  local found = {}
  for _, field in ipairs(call('HKEYS', st.keys.packed)) do
    if string.sub(field, 1, 1) == 'h' then found[#found + 1] = string.sub(field, 2) end
  end
  table.sort(found, function(one, other) return tonumber(one) > tonumber(other) end)
  return found
end
