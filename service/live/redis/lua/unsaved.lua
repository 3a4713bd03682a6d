-- Chunks that changed since they were saved: {{stage number, chunk}, …}, the chunks to return, each as weights
-- and the moments that are saved; if there are none, the names of the dirty chunks are returned. In its head,
-- each chunk has its ranges that are set aside, with their promises, which of its ranges have something
-- unfinished, which are retired, and which were, with the holders that have reported (see
-- `note_end_of_retirement`).

local refused = check_state()
if refused then return refused end
local wanted = cmsgpack.unpack(ARGV[3])
if #wanted == 0 then return reply('ok', call('HGETALL', DIRTY)) end

-- Returns which of a stage's ranges have something unfinished, by chunk.
local function read_unfinished(st)
  local found = {}
  local facts = call('HGETALL', st.keys.facts)
  for i = 1, #facts, 2 do
    local index = tonumber(facts[i])
    local said = index and read_facts(facts[i + 1])
    if said and is_unfinished(said[7], said[4], said[3], said[6]) then
      local chunk = math.floor(index / CHUNK)
      found[chunk] = found[chunk] or {}
      table.insert(found[chunk], index - CHUNK * chunk)
    end
  end
  return found
end

local heads, raws, unfinished = {}, {}, {}
for n, entry in ipairs(wanted) do
  local st = load(stage(entry[1]))
  local first = CHUNK * entry[2]
  -- An earlier version of the service has left chunks behind the end of a layout that has become smaller.
  local count = math.max(0, math.min(CHUNK, st.n - first))
  local function part(key, from)
    local raw = call('GETRANGE', key, from, from + 8 * count - 1)
    if #raw ~= 8 * count then lost() end
    raws[#raws + 1] = raw
  end
  part(st.keys.weights, 8 * first)
  for _, moment in ipairs(SAVED_MOMENTS) do part(st.keys.moments, offset_of(st, moment, first)) end
  local stamp = call('HGET', DIRTY, st.name .. ':' .. entry[2]) or false
  local aside, retired = {}, {}
  if (st.source and st.idle_before or 0) + st.retired_before > 0 then
    local fields = call('HGETALL', st.keys.idle)
    for i = 1, #fields, 2 do
      local index = tonumber(fields[i])
      if math.floor(index / CHUNK) == entry[2] then
        aside[#aside + 1] = {index - first, (struct.unpack('<d', fields[i + 1]))}
        if mark_of(fields[i + 1]) == RETIRED then retired[#retired + 1] = index - first end
      end
    end
  end
  local returned = {}
  for _, ended in ipairs(st.ending and cmsgpack.unpack(st.ending) or {}) do
    -- An earlier version of the service has noted no holder.
    if math.floor(ended[1] / CHUNK) == entry[2] then
      returned[#returned + 1] = {ended[1] - first, ended[3] or ''}
    end
  end
  unfinished[entry[1]] = unfinished[entry[1]] or read_unfinished(st)
  local theirs = unfinished[entry[1]][entry[2]] or {}
  heads[n] = {stamp, aside, call('HGET', st.keys.state, 'since'), theirs, retired, returned}
end
return {reply('ok', heads, call('HGET', META, 'incarnation')), unpack(raws)}
