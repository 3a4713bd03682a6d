-- The heads of several jobs. KEYS: the keys of each job, without those of its stages. Returns for each its
-- numbers, in how many milliseconds its next lease runs out, and how many chunks are not saved; false without a
-- state that can be trusted; or 'damaged'.

local function damaged() error('DAMAGED') end

local function head_of(meta, views, leases, deadlines, _, dirty)
  local head = call(
    'HMGET', meta, 'incarnation', 'generation', 'layout_version', 'revision', 'last_run', 'stamp', 'server', 'clock'
  )
  if head[7] ~= ARGV[1] then return false end
  check_keys_of(meta, views, leases, deadlines, dirty, damaged)
  -- A step corrects the deadlines after the clock was set back, so one is due.
  local due = is_set_back(head[8])
  local next_expiry, unsaved = due and 0 or next_expiry_in(deadlines), call('HLEN', dirty) - 1
  return {head[1], head[2], head[3], head[4], head[5], head[6], next_expiry, unsaved}
end

local found = {}
for k = 1, #KEYS, JOB_KEYS do
  local ok, head = pcall(head_of, unpack(KEYS, k, k + JOB_KEYS - 1))
  if not ok then
    local message = type(head) == 'table' and head.err or tostring(head)
    -- Any other error is not of this job alone.
    if not string.find(message, 'DAMAGED') and not string.find(message, 'WRONGTYPE') then error(head) end
    head = 'damaged'
  end
  found[#found + 1] = head
end
return cmsgpack.pack(found)
