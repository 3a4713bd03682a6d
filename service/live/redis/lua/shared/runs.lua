-- Runs.

-- The field of a stage's marks with the series of its commits.
local COMMITS = '#commits'

-- Likewise, with the holds that the last commit brought.
local KEPT = '#kept'

local function open_run(st, run)
  load(st)
  if not opens_run(run, st.run) then return end
  call('HSET', st.keys.state, 'run', run)
  drop_waiting(st)
  call('HDEL', st.keys.marks, COMMITS, KEPT)
  for _, fence in ipairs(fences()) do
    local lease = lease_at(tonumber(fence))
    if lease and lease.stage == st.name and is_fenced(lease.run, run) then
      end_lease(st, lease, 'superseded')
    end
  end
end

