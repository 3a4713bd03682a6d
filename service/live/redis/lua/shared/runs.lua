-- Runs.

-- The end of the stage's run (JSON), behind the number of that run: an end of another run is none. It is among
-- the leases, so that to lose it is to lose the state.
local function run_end(st)
  local run, ended = string.match(call('HGET', LEASES, 'e' .. st.name) or '', '^(%d+) (.*)$')
  return run == st.run and ended or ''
end

local function open_run(st, run)
  load(st)
  if not opens_run(run, st.run) then return end
  note_change()
  st.run = run
  call('HSET', st.keys.state, 'run', run)
  call('HDEL', LEASES, 'e' .. st.name)
  drop_waiting(st)
  call('HDEL', st.keys.marks, COMMITS, KEPT)
  for _, fence in ipairs(fences()) do
    local lease = lease_at(tonumber(fence))
    if lease and lease.stage == st.name and is_fenced(lease.run, run) then
      end_lease(st, lease, 'superseded')
    end
  end
end

local function end_run(st, run, ended)
  load(st)
  if not is_of_run(run, st.run) then return end
  note_change()
  call('HSET', LEASES, 'e' .. st.name, run .. ' ' .. ended)
  -- Its commits no longer prove that it finds nothing.
  call('HDEL', st.keys.marks, COMMITS)
  for _, fence in ipairs(fences()) do
    local lease = lease_at(tonumber(fence))
    if lease and lease.stage == st.name and is_of_run(text(lease.run), run) then
      end_lease(st, lease, 'released')
    end
  end
end

