-- Tries every command that the scripts and the plain commands use, with no lasting effect, and returns those
-- that the user may not run, each with the server's words. It has no header: the header reads the time.
--
-- KEYS[1]: a key of its own. ARGV[1]: unused. ARGV[2]: a channel that nobody takes for a job's.

local key, channel = KEYS[1], ARGV[2]

local tries = {
  {'TIME'},
  {'DEL', key},
  {'EXISTS', key},
  {'HSET', key, 'f', 0}, {'HSETNX', key, 'f', 0}, {'HGET', key, 'f'}, {'HMGET', key, 'f'}, {'HGETALL', key},
  {'HEXISTS', key, 'f'}, {'HKEYS', key}, {'HVALS', key}, {'HLEN', key}, {'HINCRBY', key, 'f', 1},
  {'HDEL', key, 'f'}, {'DEL', key},
  {'SET', key, ''}, {'SETRANGE', key, 0, '0'}, {'GET', key}, {'GETRANGE', key, 0, 0}, {'STRLEN', key}, {'DEL', key},
  {'RPUSH', key, ''}, {'LPOP', key}, {'DEL', key},
  {'ZADD', key, 0, 'm'}, {'ZSCORE', key, 'm'}, {'ZCOUNT', key, 0, 0}, {'ZINCRBY', key, 1, 'm'},
  {'ZRANGEBYSCORE', key, 0, 0}, {'ZREM', key, 'm'}, {'DEL', key},
  {'SADD', key, 'm'}, {'SMEMBERS', key}, {'SREM', key, 'm'}, {'DEL', key},
  {'PUBLISH', channel, cmsgpack.pack({})},
}

local denied = {}
for _, words in ipairs(tries) do
  local found = redis.pcall(unpack(words))
  if type(found) == 'table' and found.err then
    denied[#denied + 1] = words[1]
    denied[#denied + 1] = found.err
  end
end
return denied
