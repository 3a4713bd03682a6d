-- What all steps share. Each is one script: what `schema.py` says of the layout, the rules, the files of this
-- folder, and the step.
--
-- A script is isolated, but what it has written stays when it fails: every step checks first and writes
-- last. Times and promises are doubles throughout, packed as such: each instant of the years 0001 to
-- 9999 is one exactly, and so are the two ends of time and every fence.
--
-- KEYS: those of the job, then those of each stage that the step is about.
-- ARGV: the server that the caller believes to speak to, the layout it believes the job to have, and
-- the arguments of the step (MessagePack).

local call = redis.call
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

