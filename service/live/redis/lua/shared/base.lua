-- What all steps share. Each script consists of the header from `schema.py`, the rules, the files of this
-- folder, and the step.
--
-- A script is one function for Lua, and a function has at most 200 local variables: so helpers stand in a block with
-- the functions that call them.
--
-- A script is isolated, but not rolled back when it fails: so every step checks first and writes last.
-- Times and promises are doubles, and packed as such: a double holds each instant of the years 0001 to
-- 9999 exactly, and so the two ends of time and every fence.
--
-- KEYS: those of the job, then those of each stage that the step is about.
-- ARGV: the run id of the server that the caller is connected to, the layout that it believes the job has,
-- and the arguments of the step (MessagePack).

local call = redis.call
local NOBODY = struct.pack('<d', 0)

-- Read once: on some servers, time advances within a script.
local time = call('TIME')
local NOW = time[1] * 1000 + math.floor(time[2] / 1000)

local doubles, packed
do
  local formats = {}
  local function format(count)
    local found = formats[count]
    if not found then
      found = '<' .. string.rep('d', count)
      formats[count] = found
    end
    return found
  end

  -- Unpacks doubles. (struct.unpack returns the position after the last one, too.)
  function doubles(raw)
    local count = #raw / 8
    if count == 0 then return {}, 0 end
    local values = {struct.unpack(format(count), raw)}
    values[count + 1] = nil
    return values, count
  end

  function packed(values, first, last)
    return struct.pack(format(last - first + 1), unpack(values, first, last))
  end
end

-- Repeats eight bytes, as many times as wanted. (string.rep copies byte by byte.)
local function repeated(bytes, count)
  if count == 0 then return '' end
  local done = bytes
  while #done * 2 <= 8 * count do done = done .. done end
  return done .. string.sub(done, 1, 8 * count - #done)
end

local moment
do
  local moments = {}
  -- Returns the packed moment of this step, as many times as wanted.
  function moment(count)
    moments[count] = moments[count] or repeated(struct.pack('<d', NOW), count)
    return moments[count]
  end
end

-- Whether all that a text consists of is the same eight bytes.
local function consists_of(raw, bytes)
  return string.sub(raw, 1, 8) == bytes and string.sub(raw, 9) == string.sub(raw, 1, -9)
end

local function text(number)
  return string.format('%.0f', number)
end

-- Sets the fields of a hash, however many.
local function fill(key, fields)
  for i = 1, #fields, 1000 do
    call('HSET', key, unpack(fields, i, math.min(i + 999, #fields)))
  end
end

-- ---- the job

-- Part of the state is missing: the server evicted it, or somebody deleted it. The rest is dropped, too, so
-- that the next step finds no state, and the job is restored.
local function lost()
  call('DEL', META)
  error('LOST')
end

-- These keys always exist, so that losing one is noticed: the last three have a member that means nothing.
local NOTHING = '.'
local function fill_keys()
  call('HSET', LEASES, NOTHING, '')
  call('ZADD', DEADLINES, 'inf', NOTHING)
  call('HSET', DIRTY, NOTHING, 0)
  call('HSETNX', META, 'clock', 0)
end

-- Besides the run id of the server and the clock: those that `layouts.py` writes.
local META_FIELDS = 12

-- Calls `fail` if a part of a job's state is missing.
local function check_keys_of(meta, views, leases, deadlines, dirty, fail)
  if call('EXISTS', views, leases, deadlines, dirty) ~= 4 then fail() end
  if call('HLEN', meta) ~= META_FIELDS then fail() end
end

local function check_keys()
  check_keys_of(META, VIEWS, LEASES, DEADLINES, DIRTY, lost)
end

-- ---- deadlines

-- The fences of all leases.
local function fences()
  return call('ZRANGEBYSCORE', DEADLINES, '-inf', '(inf')
end

-- In how many milliseconds the next lease runs out (-1: there is none), so that the caller can expire it.
local function next_expiry_in(deadlines)
  local first = call('ZRANGEBYSCORE', deadlines, '-inf', '(inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return first[2] and math.max(0, tonumber(first[2]) - NOW) or -1
end

-- `clock` is about when a deadline was set last. It is written only now and then.
local CLOCK_STEP = 1000

local function set_deadline(fence, ttl)
  call('ZADD', DEADLINES, NOW + ttl, fence)
  local clock = tonumber(call('HGET', META, 'clock') or 0)
  if NOW > clock + CLOCK_STEP then call('HSET', META, 'clock', text(NOW)) end
end

-- If the server's clock was set back, the deadlines are, too: a lease of three seconds must not block its
-- ranges, nor keep them idle, for the hour by which the clock went back.
local function is_set_back(clock) return tonumber(clock or 0) - NOW > CLOCK_STEP end

local function follow_clock(clock)
  if not is_set_back(clock) then return end
  local back = tonumber(clock) - NOW
  for _, fence in ipairs(fences()) do call('ZINCRBY', DEADLINES, -back, fence) end
  call('HSET', META, 'clock', text(NOW))
end

local function reply(...)
  return cmsgpack.pack({next_expiry_in(DEADLINES), ...})
end

local change
-- Counts this step as a change of the job, so that other replicas find it; returns the count. Only the deadlines of
-- leases, and what is saved in the ledger, change without it.
local function note_change()
  change = change or call('HINCRBY', META, 'stamp', 1)
  return change
end

-- Returns nil if the job's state is as the caller believes, else the reply that refuses the step.
-- A state that was written under another run id may lack later writes: a restart or a failover counts as a
-- loss, whatever was kept.
local function check_state()
  local meta = call('HMGET', META, 'server', 'at', 'clock')
  if meta[1] ~= ARGV[1] then return cmsgpack.pack({-1, 'lost'}) end
  if not meta[2] then lost() end
  if meta[2] ~= ARGV[2] then return cmsgpack.pack({-1, 'at', meta[2]}) end
  check_keys()
  follow_clock(meta[3])
  return nil
end

