-- Leases: their records, and who owns which ranges.

-- Returns the lease of a token: nil if unknown; with `reason` if it is over.
local function lease_of(token)
  local raw = call('HGET', LEASES, 't' .. token)
  if not raw then return nil end
  if string.sub(raw, 1, 1) == 'x' then
    local over = cmsgpack.unpack(string.sub(raw, 2))
    return {reason = over[1], stage = over[2], run = over[3]}
  end
  local r = cmsgpack.unpack(raw)
  local lease = {fence = r[1], stage = r[2], holder = r[3], rank = r[4], ttl = r[5], run = r[6], watched = r[7]}
  lease.deadline = tonumber(call('ZSCORE', DEADLINES, text(lease.fence)) or 0)
  if not is_current(lease.deadline, NOW) then lease.reason = 'expired' end
  return lease
end

local function lease_at(fence)
  local token = call('HGET', LEASES, 'f' .. text(fence))
  if not token then return nil end
  local lease = lease_of(token)
  if lease then lease.token = token end
  return lease
end

-- Removes a lease that owns no range any more; its reason stays known for a while.
local function forget(lease, reason)
  local fence = text(lease.fence)
  call('HSET', LEASES, 't' .. lease.token, 'x' .. cmsgpack.pack({reason, lease.stage, lease.run}))
  call('HDEL', LEASES, 'f' .. fence, 'm' .. fence, 'n' .. fence)
  call('ZREM', DEADLINES, fence)
  if call('RPUSH', ENDED, lease.token) > REMEMBERED then
    local oldest = 't' .. call('LPOP', ENDED)
    -- A claim that is sent again, because its answer was lost, has its token again. Its lease of before has ended,
    -- and the token is that of the lease since.
    if string.sub(call('HGET', LEASES, oldest) or '', 1, 1) == 'x' then call('HDEL', LEASES, oldest) end
  end
end

local among, still_owned, members, end_lease, grant
do
  local MAX_PIECE = 4096

  -- Calls `handle(start, raw)` for the owners of the ranges in `runs` (start, count, start, count …), a piece at
  -- a time; `raw` holds eight bytes for each.
  local function each_owner(st, runs, handle)
    for r = 1, #runs, 2 do
      local start, left = runs[r], runs[r + 1]
      while left > 0 do
        local count = math.min(left, MAX_PIECE)
        local raw = call('GETRANGE', st.keys.owners, 8 * start, 8 * (start + count) - 1)
        if #raw ~= 8 * count then lost() end
        handle(start, raw, count)
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

  -- Whether a range is in runs.
  function among(runs, index)
    for r = 1, #runs, 2 do
      if index >= runs[r] and index < runs[r] + runs[r + 1] then return true end
    end
    return false
  end

  -- Returns those of `runs` that a lease is still on, and how many ranges they are.
  function still_owned(st, fence, runs)
    local mine, left, total = struct.pack('<d', fence), {}, 0
    each_owner(st, runs, function(start, raw, count)
      if consists_of(raw, mine) then
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

  local function set_owner(st, runs, owner)
    for r = 1, #runs, 2 do
      local start, left = runs[r], runs[r + 1]
      while left > 0 do
        local count = math.min(left, MAX_PIECE)
        call('SETRANGE', st.keys.owners, 8 * start, repeated(owner, count))
        start, left = start + count, left - count
      end
    end
  end

  -- Notes since when ranges are leased without a gap: since now, those of `runs` whose owners (eight bytes) are in
  -- `anew`. A lease that has run out left a gap, even if nobody has ended it yet.
  local function note_leased(st, runs, anew, watched)
    local function note(first, count)
      local held = watched and moment(count) or repeated(struct.pack('<d', held_moment(NOW, watched)), count)
      call('SETRANGE', st.keys.moments, offset_of(st, HELD_SINCE, first), held)
    end
    each_owner(st, runs, function(start, raw, count)
      local first = string.sub(raw, 1, 8)
      if consists_of(raw, first) then
        if anew[first] then note(start, count) end
        return
      end
      for i = 0, count - 1 do
        if anew[string.sub(raw, 8 * i + 1, 8 * i + 8)] then note(start + i, 1) end
      end
    end)
  end

  function members(fence)
    local raw = call('HGET', LEASES, 'm' .. text(fence))
    return raw and cmsgpack.unpack(raw) or {}
  end

  -- Notes the holder of a lease that has run out, for display: {{deadline, holder}, …}, the newest first.
  local function note_departed(st, lease)
    local field = 'l' .. st.name
    local raw = call('HGET', LEASES, field)
    local departed = raw and cmsgpack.unpack(raw) or {}
    table.insert(departed, 1, {lease.deadline, lease.holder})
    departed[MAX_DEPARTED + 1] = nil
    call('HSET', LEASES, field, cmsgpack.pack(departed))
  end

  -- Ends a lease: its ranges are free, and those that were idle under it are waited for again.
  function end_lease(st, lease, reason)
    note_change()
    end_idleness(st, struct.pack('<d', lease.fence))
    local runs, total = still_owned(st, lease.fence, members(lease.fence))
    set_owner(st, runs, NOBODY)
    local freed_at = struct.pack('<d', math.min(lease.deadline, NOW))
    for r = 1, #runs, 2 do
      local at, count = offset_of(st, HELD_SINCE, runs[r]), runs[r + 1]
      call('SETRANGE', st.keys.moments, at, repeated(freed_at, count))
    end
    if total > 0 then
      call('HINCRBY', st.keys.state, 'leased', -total)
      if reason == 'expired' then note_departed(st, lease) end
    end
    forget(lease, reason)
  end

  -- Grants `runs` of a stage, but for the ranges of leases that keep theirs. Returns the new lease, the runs that
  -- it has, and what was denied, by lease: {holder, time left, runs}. Nil in place of the lease: nothing is granted.
  function grant(st, token, runs, holder, ttl, rank, run, watched)
    -- By owner (eight bytes): its lease if it keeps its ranges, false if it yields.
    local keepers, anew = {[NOBODY] = false}, {[NOBODY] = true}
    local function keeper(owner)
      local found = keepers[owner]
      if found == nil then
        local lease = lease_at((struct.unpack('<d', owner)))
        local yields = not lease or lease.reason or takes_over(rank, lease.rank, lease.holder == holder)
        found = not yields and lease or false
        local before = lease and lease.watched and not lease.reason
        keepers[owner], anew[owner] = found, not continues_watch(watched, before)
      end
      return found
    end

    local granted, total, freed, taken, denied, order = {}, 0, 0, {}, {}, {}
    local function decide(owner, start, count)
      local lease = keeper(owner)
      if lease then
        if not denied[owner] then
          denied[owner] = {lease.holder, math.max(0, lease.deadline - NOW), {}}
          order[#order + 1] = denied[owner]
        end
        append(denied[owner][3], start, count)
        return
      end
      append(granted, start, count)
      total = total + count
      if owner == NOBODY then
        freed = freed + count
      else
        taken[owner] = (taken[owner] or 0) + count
      end
    end
    each_owner(st, runs, function(start, raw, count)
      local first = string.sub(raw, 1, 8)
      if consists_of(raw, first) then return decide(first, start, count) end
      for i = 0, count - 1 do decide(string.sub(raw, 8 * i + 1, 8 * i + 8), start + i, 1) end
    end)
    if total == 0 then return nil, nil, order end

    note_change()
    local fence = call('HINCRBY', META, 'fence', 1)
    local fence_text, owner = text(fence), struct.pack('<d', fence)
    -- The old leases are fenced here, in the same step that grants the new one: no report can come between
    -- the two.
    note_leased(st, granted, anew, watched)
    set_owner(st, granted, owner)
    end_idleness(st, owner)
    if freed > 0 then call('HINCRBY', st.keys.state, 'leased', freed) end
    for loser, count in pairs(taken) do
      local lost = (struct.unpack('<d', loser))
      local lease = lease_at(lost)
      if lease and call('HINCRBY', LEASES, 'n' .. text(lost), -count) <= 0 then
        forget(lease, lease.reason or 'superseded')
      end
    end
    call(
      'HSET', LEASES,
      't' .. token, cmsgpack.pack({fence, st.name, holder, rank, ttl, tonumber(run), watched}),
      'f' .. fence_text, token,
      'm' .. fence_text, cmsgpack.pack(granted),
      'n' .. fence_text, total
    )
    set_deadline(fence_text, ttl)
    local lease = {
      token = token, fence = fence, stage = st.name, holder = holder, rank = rank, ttl = ttl, run = tonumber(run),
      deadline = NOW + ttl,
    }
    return lease, granted, order
  end
end
