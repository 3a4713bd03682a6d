-- Stages: their state, their view, and the tree of least weights over their ranges.

local function stage(number)
  return {
    keys = stage_keys(JOB_KEYS + STAGE_KEYS * (number - 1)),
    minima = {},
    promised = 0,
    idle = 0,
    final = 0,
    retired = 0,
  }
end

local offset_of, load
do
  -- Those that `states.py` writes; `waiting`, `retired` and `ending` come and go.
  local STATE_FIELDS = 11

  -- How many nodes the tree over so many ranges has.
  local function tree_size(n)
    local total, size = 0, n
    repeat
      size = math.ceil(size / BLOCK)
      total = total + size
    until size == 1
    return total
  end

  -- Where a range is within the moments, given the column: one of REPORTED_AT, RAISED_AT, HELD_SINCE.
  function offset_of(st, moment, index) return 8 * (moment * st.n + index) end

  -- A column that was lost and then written in part would read as zeros: a promise that nobody made.
  local function check_columns(st)
    for _, name in ipairs({'weights', 'owners'}) do
      if call('STRLEN', st.keys[name]) ~= 8 * st.n then lost() end
    end
    if call('STRLEN', st.keys.moments) ~= 8 * MOMENTS * st.n then lost() end
    if call('STRLEN', st.keys.tree) ~= 8 * tree_size(st.n) then lost() end
    -- Without its entry here, a range would stay idle or retired for ever.
    if call('HLEN', st.keys.idle) ~= st.idle_before + st.retired_before then lost() end
  end

  function load(st)
    if st.n then return st end
    local s = call(
      'HMGET', st.keys.state, 'n', 'source', 'run', 'epoch', 'idle', 'name', 'waiting', 'final', 'retired',
      'ending'
    )
    st.n, st.source, st.run, st.epoch = tonumber(s[1]), s[2] == '1', s[3], s[4]
    st.idle_before, st.name, st.final_before = tonumber(s[5]), s[6], tonumber(s[8])
    st.retired_before, st.ending = tonumber(s[9] or 0), s[10]
    if not st.n then lost() end
    local fields = STATE_FIELDS + (s[7] and 1 or 0) + (s[9] and 1 or 0) + (s[10] and 1 or 0)
    if call('HLEN', st.keys.state) ~= fields then lost() end
    if st.n > 0 then check_columns(st) end
    return st
  end
end

-- Unpacks a view: its members as `schema.pack_view` has them.
local function unpack_view(raw)
  -- An earlier version of the service has not written the last member: the one before stands for it.
  if #raw < VIEW_SIZE then raw = raw .. string.sub(raw, -8) end
  local view = {struct.unpack(VIEW, raw)}
  -- The position behind the last member, which struct returns, too.
  table.remove(view)
  return view
end

local function view(st)
  local raw = call('HGET', VIEWS, st.name)
  if not raw then lost() end
  local all = unpack_view(raw)
  return {all = all, input = all[1], output = all[2], idle = all[3] == 1}
end

-- Returns the least weight of the stage's ranges.
local function lowest(st)
  local raw = call('GETRANGE', st.keys.tree, -8, -1)
  if #raw ~= 8 then lost() end
  return (struct.unpack('<d', raw))
end

-- Marks behind the promise of a range that is set aside: idle by policy, and not by its worker's word; retired.
local POLICY, RETIRED = 'p', 'r'

local function mark_of(entry)
  return string.sub(entry, 9)
end

-- Returns what the stage's ranges agree on, after `write_totals`.
local function agreement(st)
  local low = lowest(st)
  local lowest_idle = MAX
  if low == IDLE then
    -- Nobody is active: that is rare, and then the least of all promises counts.
    for _, entry in ipairs(st.source and call('HVALS', st.keys.idle) or {}) do
      if mark_of(entry) ~= RETIRED then lowest_idle = math.min(lowest_idle, (struct.unpack('<d', entry))) end
    end
    low = MAX
  end
  if not st.source then return agree_keyed(low, st.n, st.idle_before, st.final_before + st.retired_before) end
  return agree(low, st.idle_before, lowest_idle)
end

-- Updates the tree with the new minima of blocks, level by level. Each node is the least of its 64 children;
-- level 1 is computed from the weights, and the last level has one node.
local function update_tree(st)
  local minima = st.minima
  local size, offset = math.ceil(st.n / BLOCK), 0
  while next(minima) do
    local nodes, parents = {}, {}
    for node in pairs(minima) do nodes[#nodes + 1] = node end
    table.sort(nodes)
    local i = 1
    while i <= #nodes do
      local first, values = nodes[i], {minima[nodes[i]]}
      while nodes[i + 1] == nodes[i] + 1 and #values < 4096 do
        i = i + 1
        values[#values + 1] = minima[nodes[i]]
      end
      call('SETRANGE', st.keys.tree, 8 * (offset + first), packed(values, 1, #values))
      i = i + 1
    end
    if size == 1 then break end
    for _, node in ipairs(nodes) do
      local parent = math.floor(node / BLOCK)
      if not parents[parent] then
        local from = BLOCK * parent
        local to = math.min(from + BLOCK, size) - 1
        local children, count = doubles(call('GETRANGE', st.keys.tree, 8 * (offset + from), 8 * (offset + to) + 7))
        if count ~= to - from + 1 then lost() end
        local least = children[1]
        for c = 2, count do
          if children[c] < least then least = children[c] end
        end
        parents[parent] = least
      end
    end
    offset, size, minima = offset + size, math.ceil(size / BLOCK), parents
  end
  st.minima = {}
end

