-- Decisions about quiet ranges: {{index, fence, quiet since (-1: no facts), idle, promise}, …}. Each counts only if its range
-- is as it was observed. Returns whether the stage's agreement is ahead of what is published.

local refused = check_state()
if refused then return refused end
local st = load(stage(1))
for _, decision in ipairs(cmsgpack.unpack(ARGV[3])) do
  local index, fence, quiet_since, idle, promise = unpack(decision)
  local at = 8 * index
  local lease = fence ~= 0 and lease_at(fence)
  local same = call('GETRANGE', st.keys.owners, at, at + 7) == struct.pack('<d', fence)
    and read_quiet_since(st, index) == quiet_since
    and (fence == 0 or (lease and not lease.reason))
    and not is_retired(st, index)
  local lets_pass = idle or promise > MIN
  if same and not (lets_pass and leaves_unfinished(st, index)) then
    note_change()
    local block = math.floor(index / BLOCK)
    apply(st, block, 1, {index - BLOCK * block + 1}, {promise}, {idle and POLICY or false}, {})
    write_totals(st)
  end
end
local published = view(st)
return reply('ok', is_ahead(agreement(st), published.output, published.idle))
