-- A batch of reports:
-- {{stage, token, epoch, observed, capped, spans, promises, idle, notes, facts, holds, joined, claim, releases,
--   joins}, …}.
-- `claim`: {runs, holder, ttl, rank, run} of a claim of its ranges, whose lease gets the token; false: it has one.
-- `joins`: it claims shards that have yet to join.
-- `holds`: those of a packed report, for all ranges of its lease, as one text.
-- `joined`: {what is expected, as one text, the runs that `apply_joined` takes}; false: its sender has not joined it.
-- A span is {first block, blocks, low, high} (positions low … high of it, from 1 on) or
-- {first block, blocks, positions}; `promises` has the promises of all spans, as one text.

-- The positions of a span as `apply` takes them, and their number.
local function positions(span)
  if span[4] then return span[3] - 1, span[4] - span[3] + 1 end
  return span[3], #span[3]
end

local function position(at, k)
  return type(at) == 'number' and at + k or at[k]
end

-- Which of the span's ranges the lease is on: nil if on all of them.
local function kept(st, span, mine)
  local at, count = positions(span)
  local start = BLOCK * span[1]
  if span[4] then
    local raw = call('GETRANGE', st.keys.owners, 8 * (start + span[3] - 1), 8 * (start + span[4]) - 1)
    if #raw ~= 8 * count then lost() end
    if consists_of(raw, mine) then return nil, count end
  end
  local size = math.min(BLOCK * span[2], st.n - start)
  local raw = call('GETRANGE', st.keys.owners, 8 * start, 8 * (start + size) - 1)
  if #raw ~= 8 * size then lost() end
  local keep, total = {}, 0
  for k = 1, count do
    local i = position(at, k)
    keep[k] = string.sub(raw, 8 * i - 7, 8 * i) == mine
    if keep[k] then total = total + 1 end
  end
  if total == count then return nil, count end
  return keep, total
end

-- The part of a column of eight bytes for each entry, after `offset` of them.
local function part(column, offset, count)
  return string.sub(column, 8 * offset + 1, 8 * (offset + count))
end

-- Whether the promises of all ranges are those that the sender of a report has expected. If a range of the
-- stage is idle or retired, its promise is kept elsewhere.
local function as_expected(st, joined)
  if not joined or any_set_aside(st) then return false end
  local expected, runs = unpack(joined)
  local offset = 0
  for _, run in ipairs(runs) do
    local first, count = run[1], run[2]
    local raw = call('GETRANGE', st.keys.weights, 8 * first, 8 * (first + count) - 1)
    if raw ~= part(expected, offset, count) then return false end
    offset = offset + count
  end
  return true
end

local function epoch_refused(st, epoch)
  local waiting = waiting_epochs(st)
  local arrived = arrival(epoch, st.epoch, waiting)
  if arrived == 'stale' then return {'stale-epoch', st.epoch} end
  if arrived == 'too many' then return {'epochs-waiting', #waiting} end
  return nil
end

local function lease_refused(st, lease)
  if not lease or lease.stage ~= st.name then return {'lease-lost', 'unknown'} end
  if is_fenced(lease.run, st.run) then return {'stale-run', st.run, text(lease.run)} end
  return lease.reason and {'lease-lost', lease.reason} or nil
end

local function claim_refused(st, claim)
  local run = claim[5]
  return not is_of_run(run, st.run) and {'stale-run', st.run, run} or nil
end

-- Notes that reports were applied, and what they say besides promises.
local function note_applied(st, span, count, keep, facts, offset)
  local at = positions(span)
  local start = BLOCK * span[1]
  if span[4] and not keep then
    call('SETRANGE', st.keys.moments, offset_of(st, REPORTED_AT, start + span[3] - 1), moment(count))
  else
    for k = 1, count do
      if not keep or keep[k] then
        call('SETRANGE', st.keys.moments, offset_of(st, REPORTED_AT, start + position(at, k) - 1), moment(1))
      end
    end
  end
  if not facts and not has_facts(st) then return end
  for k = 1, count do
    if not keep or keep[k] then
      keep_facts(st, start + position(at, k) - 1, facts and facts[offset + k])
    end
  end
  st.has_facts = true
end

-- Keeps the holds of a packed report. Those of older leases on the same ranges, or on some of all, are
-- said anew by it.
local function keep_packed(st, lease, holds)
  local fence = text(lease.fence)
  if call('HSET', st.keys.packed, 'h' .. fence, holds) == 0 then return end
  local runs = call('HGET', LEASES, 'm' .. fence)
  local before = call('HGET', st.keys.packed, 'r' .. runs)
  if before then call('HDEL', st.keys.packed, 'h' .. before, 'm' .. before) end
  call('HSET', st.keys.packed, 'm' .. fence, runs, 'r' .. runs, fence)
  local all = runs == cmsgpack.pack({0, st.n})
  -- Each has three fields. Some more than are kept, so that not each new one has to look at all others.
  if not all and call('HLEN', st.keys.packed) <= 3 * (MAX_PACKED + MAX_PACKED / 4) then return end
  for i, other in ipairs(packed_fences(st)) do
    if i > MAX_PACKED or (all and other ~= fence) then
      local theirs = call('HGET', st.keys.packed, 'm' .. other)
      call('HDEL', st.keys.packed, 'h' .. other, 'm' .. other, 'r' .. (theirs or ''))
    end
  end
end

-- The holds of a packed report with the column that `pack_holds` has left out, if it has.
local function whole_holds(holds, promises)
  local is_left_out = string.find(holds, '\n', 1, true) == #holds and string.sub(holds, 1, 2) ~= '[]'
  return is_left_out and holds .. promises or holds
end

-- Returns the holds of a packed report (see `pack_holds`) as notes, one for each range of the lease.
local function unpacked_notes(holds, count)
  local kept = {}
  for n = 1, count do kept[n] = {} end
  local head = string.find(holds, '\n', 1, true)
  for c, component in ipairs(cjson.decode(string.sub(holds, 1, head - 1))) do
    for n = 1, count do
      local time = struct.unpack('<d', holds, head + 8 * ((c - 1) * count + n) - 7)
      if time < MAX then kept[n][#kept[n] + 1] = cjson.encode(component) .. ':' .. text(time) end
    end
  end
  for n = 1, count do kept[n] = '{"holds":{' .. table.concat(kept[n], ',') .. '}}' end
  return kept
end

-- `masked`: there are holds of packed reports, which an empty note hides.
local function note(st, span, count, keep, notes, offset, masked)
  local at = positions(span)
  local start = BLOCK * span[1]
  local any = st.noted
  if any == nil then
    any = call('EXISTS', st.keys.notes) == 1
    st.noted = any
  end
  if not notes and not any and not masked then return end
  local set, gone = {}, {}
  for k = 1, count do
    if not keep or keep[k] then
      local index = start + position(at, k) - 1
      local noted = notes and notes[offset + k]
      if noted or masked then
        set[#set + 1], set[#set + 2] = index, noted or '{}'
      else
        gone[#gone + 1] = index
      end
    end
  end
  for i = 1, #set, 1000 do call('HSET', st.keys.notes, unpack(set, i, math.min(i + 999, #set))) end
  st.noted = any or #set > 0
  if any then
    for i = 1, #gone, 1000 do call('HDEL', st.keys.notes, unpack(gone, i, math.min(i + 999, #gone))) end
  end
end

-- Adds to those that are reported idle those that remain so by policy.
local function remaining_idle(st, span, count, idle, facts, offset)
  local at = positions(span)
  for k = 1, count do
    local index = BLOCK * span[1] + position(at, k) - 1
    idle[k] = idle[k] or remains_idle(st, index, facts[offset + k])
  end
  return idle
end

-- Lets a report wait for its epoch; of several attempts, the smallest promise counts.
local function wait(st, epoch, capped, span, promises, idle, fence, facts, offset, behind)
  local at = positions(span)
  -- Its worker lives, also if the epoch is never committed.
  end_retirements(st, span[1], at, promises)
  local start = BLOCK * span[1]
  local count = math.min(BLOCK * span[2], st.n - start)
  local weights = doubles(call('GETRANGE', st.keys.weights, 8 * start, 8 * (start + count) - 1))
  local by_block = {}
  for k = 1, #promises do
    if promises[k] then
      local index = start + position(at, k) - 1
      if is_behind(promise_of(st, index, weights[position(at, k)]), promises[k]) then
        behind[#behind + 1] = index
      end
      local block = math.floor(index / BLOCK)
      by_block[block] = by_block[block] or {}
      local entry = by_block[block]
      local reported = facts and facts[offset + k] or false
      local unfinished = says_unfinished(reported)
      if reported then note_waiting(st, index, is_quiet(read_reported(reported)), unfinished) end
      entry[#entry + 1] = {index, promises[k], capped, idle and idle[k] or false, fence, reported, unfinished}
    end
  end
  local registered = cmsgpack.unpack(call('HGET', st.keys.waiting, epoch) or cmsgpack.pack({}))
  local known = {}
  for _, block in ipairs(registered) do known[block] = true end
  for block, entries in pairs(by_block) do
    local field = epoch .. ':' .. block
    local raw = call('HGET', st.keys.waiting, field)
    local merged, where = raw and cmsgpack.unpack(raw) or {}, {}
    for i, entry in ipairs(merged) do where[entry[1]] = i end
    for _, entry in ipairs(entries) do
      local i = where[entry[1]]
      if i then
        local before = merged[i]
        before[6] = before[6] and call('HGET', st.keys.waiting, facts_field(epoch, entry[1]))
        entry = {
          entry[1],
          unpack(join_attempts({unpack(before, 2, 7)}, {unpack(entry, 2, 7)}), 1, 6)
        }
      else
        i = #merged + 1
        where[entry[1]] = i
      end
      -- Facts are bytes, so they are kept apart from what is packed.
      if entry[6] then
        call('HSET', st.keys.waiting, facts_field(epoch, entry[1]), entry[6])
        entry[6] = true
      end
      merged[i] = entry
    end
    call('HSET', st.keys.waiting, field, cmsgpack.pack(merged))
    if not known[block] then registered[#registered + 1] = block end
  end
  call('HSET', st.keys.waiting, epoch, cmsgpack.pack(registered))
end

-- Whether any of a report's ranges is among the keys of a table.
local function has_any(found, spans, keeps)
  for n, span in ipairs(spans) do
    local keep, at, count = keeps[n], positions(span)
    for k = 1, count do
      if (not keep or keep[k]) and found[BLOCK * span[1] + position(at, k) - 1] then return true end
    end
  end
  return false
end

-- Whether the end of a retirement of any of these ranges is not saved yet.
local function has_unsaved_end(st, spans, keeps)
  if not st.ending then return false end
  local ending = {}
  for _, entry in ipairs(cmsgpack.unpack(st.ending)) do ending[entry[1]] = true end
  return has_any(ending, spans, keeps)
end

-- Returns the result of a report, and which of the ranges of its spans it was applied to.
local function apply_report(st, report)
  load(st)
  local _, token, epoch, observed, capped, spans, packed_promises, idle_flags, notes, facts, holds, joined =
    unpack(report)
  local claim, releases, joins = unpack(report, 13)
  local lease = not claim and lease_of(token) or nil
  local refused = claim and claim_refused(st, claim) or not claim and lease_refused(st, lease)
  refused = refused or epoch and epoch_refused(st, epoch)
  if refused then return refused end
  local published = view(st)
  if not may_observe(observed, published.input) then return {'input-ahead', published.all} end
  if joins then return {'joining'} end
  local claimed, denied
  if claim then
    -- Last, so that a report that is refused claims nothing.
    lease, claimed, denied = grant(st, token, unpack(claim))
    if not lease then return {'conflict', denied} end
  end
  st.reporter = lease.holder

  local mine = struct.pack('<d', lease.fence)
  local keeps, counts, accepted, rejected = {}, {}, 0, {}
  local granted
  for n, span in ipairs(spans) do
    local at, count = positions(span)
    local keep, total = kept(st, span, mine)
    keeps[n], counts[n], accepted = keep, count, accepted + total
    if keep and not claim then
      granted = granted or members(lease.fence)
      for k = 1, count do
        if not keep[k] then
          local index = BLOCK * span[1] + position(at, k) - 1
          rejected[#rejected + 1] = {index, among(granted, index) and 'superseded' or 'unknown'}
        end
      end
    end
  end
  if accepted == 0 then return {'none', rejected} end

  local waits = epoch and waits_for(st, epoch)
  if waits then waiting_blocks(st, epoch) end

  -- Everything is checked: from here on nothing is refused.
  note_change()
  set_deadline(text(lease.fence), lease.ttl)
  local behind, offset = {}, 0
  local masked = false
  holds = holds and whole_holds(holds, packed_promises)
  if holds and #rejected > 0 then
    -- Of the others, it must not be shown what it says: they belong to somebody else.
    notes, holds = unpacked_notes(holds, accepted + #rejected), false
  end
  if holds then
    keep_packed(st, lease, holds)
  else
    masked = call('EXISTS', st.keys.packed) == 1
    if masked then st.noted = true end
  end
  if epoch and not waits then
    local waiting = waiting_epochs(st)
    waiting[#waiting + 1] = epoch
    call('HSET', st.keys.state, 'waiting', cmsgpack.pack(waiting))
  end
  local foreseen = not epoch and #rejected == 0 and as_expected(st, joined)
  for n, span in ipairs(spans) do
    local keep, count = keeps[n], counts[n]
    note(st, span, count, keep, notes, offset, masked)
    if not epoch then note_applied(st, span, count, keep, facts, offset) end
    if not foreseen then
      local promises, idle = doubles(part(packed_promises, offset, count)), idle_flags and {} or nil
      for k = 1, count do
        if keep and not keep[k] then promises[k] = false end
        if idle then idle[k] = idle_flags[offset + k] end
      end
      if epoch then
        wait(st, epoch, capped, span, promises, idle, lease.fence, facts, offset, behind)
      else
        if facts and st.idle_before > 0 then idle = remaining_idle(st, span, count, idle or {}, facts, offset) end
        apply(st, span[1], span[2], (positions(span)), promises, idle, behind)
      end
    end
    offset = offset + count
  end
  if not epoch and st.has_facts then
    local touched = {}
    for _, span in ipairs(spans) do
      for block = span[1], span[1] + span[2] - 1 do touched[block] = true end
    end
    note_unfinished(st, touched)
  end
  offset = 0
  for _, run in ipairs(foreseen and joined[2] or {}) do
    apply_joined(st, run, part(packed_promises, offset, run[2]))
    offset = offset + run[2]
  end
  st.published = published
  if releases then end_lease(st, lease, 'released') end
  -- A claim ends the idleness of its ranges, also if the report waits for its epoch.
  local may_advance = not epoch or claim ~= false
  local granting = claim and {text(lease.fence), claimed, denied}
  local left = releases and 0 or lease.ttl
  local ends_retirement = has_unsaved_end(st, spans, keeps)
  return {'ok', accepted, behind, rejected, left, published.all, may_advance, granting, ends_retirement}, keeps
end

local refused = check_state()
if refused then return refused end
local batch = cmsgpack.unpack(ARGV[3])
local stages, results, applied = {}, {}, {}
for n, report in ipairs(batch) do
  local k = report[1]
  stages[k] = stages[k] or stage(k)
  results[n], applied[n] = apply_report(stages[k], report)
end
-- Once for the whole batch: for the tree, it costs little more than a single report.
local ahead = {}
for k, st in pairs(stages) do
  if st.n then write_totals(st) end
  local published = st.published
  ahead[k] = published and is_ahead(agreement(st), published.output, published.idle) or false
end
for n, report in ipairs(batch) do
  local result, keeps = results[n], applied[n]
  if keeps then
    result[#result + 1] = must_wait(stages[report[1]], function(found) return has_any(found, report[6], keeps) end)
  end
end
return reply('ok', results, ahead)
