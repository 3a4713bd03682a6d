-- Puts the next layout of a frozen job in place: {channel, meta fields, removed stage names,
-- {{S fields, I fields, H fields, E fields, view name, view}, …}, {{fence, runs, held}, …},
-- {dirty fields}}; ARGV[4 …]: weights, tree, owners and moments of each stage. Leases without runs end.
-- KEYS after those of the stages: keys of stages that go.

local answered = unfit()
if answered then return answered end
local channel, meta, removed, stages, leases, dirty = unpack(cmsgpack.unpack(ARGV[3]))

local function fill(key, fields)
  for i = 1, #fields, 1000 do
    call('HSET', key, unpack(fields, i, math.min(i + 999, #fields)))
  end
end

for k = 7, #KEYS do call('DEL', KEYS[k]) end
for _, name in ipairs(removed) do call('HDEL', VIEWS, name) end
for k, entry in ipairs(stages) do
  local st = stage(k)
  fill(st.S, entry[1])
  fill(st.I, entry[2])
  fill(st.H, entry[3])
  fill(st.E, entry[4])
  if not show(entry[5], entry[6]) then call('HSETNX', VIEWS, entry[5], entry[6]) end
  local base = 4 * k
  if #ARGV[base] > 0 then
    call('SET', st.W, ARGV[base])
    call('SET', st.T, ARGV[base + 1])
    call('SET', st.O, ARGV[base + 2])
    call('SET', st.A, ARGV[base + 3])
  end
end
for _, entry in ipairs(leases) do
  local lease = lease_at(entry[1])
  if lease and entry[3] == 0 then
    forget(lease, lease.reason or 'superseded')
  elseif lease then
    local f = text(entry[1])
    call('HSET', LEASES, 'm' .. f, cmsgpack.pack(entry[2]), 'n' .. f, entry[3])
  end
end
local stamp = call('HINCRBY', META, 'stamp', 1)
for _, field in ipairs(dirty) do call('HSET', DIRTY, field, stamp) end
call('HSET', META, unpack(meta))
call('PUBLISH', channel, cmsgpack.pack({}))
return answer('ok')
