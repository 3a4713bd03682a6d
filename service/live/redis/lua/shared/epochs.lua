-- Reports that wait for the commit of their epoch.

local function waiting_epochs(st)
  local raw = call('HGET', st.keys.state, 'waiting')
  return raw and cmsgpack.unpack(raw) or {}
end

local function waits_for(st, epoch)
  for _, other in ipairs(waiting_epochs(st)) do
    if other == epoch then return true end
  end
  return false
end

-- Returns the blocks in which reports wait for an epoch, and what waits in one of them.
local function waiting_blocks(st, epoch)
  return cmsgpack.unpack(call('HGET', st.keys.waiting, epoch) or lost())
end

local function waiting_in(st, epoch, block)
  return cmsgpack.unpack(call('HGET', st.keys.waiting, epoch .. ':' .. block) or lost())
end

-- The field of the facts that wait with a range's report.
local function facts_field(epoch, index)
  return epoch .. ':f' .. index
end

-- The series of the stage's commits, or nil. An earlier version of the service has written its first members alone.
local function commits_of(st)
  local raw = call('HGET', st.keys.marks, COMMITS)
  if not raw then return nil end
  local since, last, count = struct.unpack('<ddd', raw)
  local before = #raw >= 32 and struct.unpack('<d', raw, 25) or since
  local arrived = #raw >= 40 and struct.unpack('<d', raw, 33) or last
  return {since, last, count, before, arrived}
end

local function keep_commits(st, series)
  call('HSET', st.keys.marks, COMMITS, struct.pack('<ddddd', unpack(series)))
end

-- Notes anew the ranges of some blocks (the keys of a table) that reports left unfinished which still wait. Facts that
-- are applied before end the earlier note. Mirrors the function of this name in service/live/memory/epochs.py.
local function note_unfinished(st, blocks)
  for _, epoch in ipairs(waiting_epochs(st)) do
    for _, block in ipairs(waiting_blocks(st, epoch)) do
      if blocks[block] then
        for _, entry in ipairs(waiting_in(st, epoch, block)) do
          if entry[7] then note_waiting(st, entry[1], true, true) end
        end
      end
    end
  end
end

-- Drops what waits for epochs up to this one (nil: for any).
local function drop_waiting(st, upto)
  local kept = {}
  for _, epoch in ipairs(waiting_epochs(st)) do
    if upto and epoch > upto then
      kept[#kept + 1] = epoch
    else
      for _, block in ipairs(waiting_blocks(st, epoch)) do
        for _, entry in ipairs(waiting_in(st, epoch, block)) do
          if entry[6] then call('HDEL', st.keys.waiting, facts_field(epoch, entry[1])) end
        end
        call('HDEL', st.keys.waiting, epoch .. ':' .. block)
      end
      call('HDEL', st.keys.waiting, epoch)
    end
  end
  if #kept > 0 then
    call('HSET', st.keys.state, 'waiting', cmsgpack.pack(kept))
  else
    call('HDEL', st.keys.state, 'waiting')
  end
end

