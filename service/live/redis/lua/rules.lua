-- The rules of service/frontier that a step judges by: each mirrors the Python function of the same name,
-- and one table of vectors holds the two together. No function here asks the server anything.
--
-- Instants and fences are doubles. Runs and the parts of a rank are texts of one length, so that they
-- compare as the numbers do. A missing value is nil, false or '', where Python has None.

-- ---- leases

local function is_current(deadline, now) return now < deadline end

local function takes_over(rank, held_by, same_holder) return same_holder or rank > held_by end

local function opens_run(run, current) return tonumber(run) > tonumber(current) end

local function is_of_run(run, current) return run == current end

local function is_fenced(run, current) return tonumber(run) < tonumber(current) end

-- ---- epochs

-- `waiting` is a list of epochs.
local function arrival(epoch, committed, waiting)
  if committed ~= '' and epoch <= committed then return 'stale' end
  for _, other in ipairs(waiting) do
    if other == epoch then return 'waits' end
  end
  return #waiting >= MAX_WAITING_EPOCHS and 'too many' or 'waits'
end

local function admission(epoch, committed)
  if committed == '' or epoch > committed then return 'fresh' end
  return epoch == committed and 'repeated' or 'stale'
end

-- What waits is {promise, capped at commit, idle, fence}.
local function join_attempts(earlier, later)
  return {
    math.min(earlier[1], later[1]),
    earlier[2] or later[2],
    earlier[3] and later[3],
    later[4],
  }
end

local function lacks_cap(observed, capped_at_commit) return capped_at_commit and not observed end

local function promise_at_commit(promise, observed)
  return observed and math.min(promise, observed) or promise
end

local function idle_at_commit(idle, same_lease, is_current_lease)
  return idle and same_lease and is_current_lease
end

-- ---- reports

local function join_report(promise, reported, idle)
  return reported > promise and reported or promise, idle
end

local function is_behind(promise, reported) return reported > MIN and reported < promise end

local function may_observe(observed, published) return not observed or observed <= published end

-- ---- agreement

-- An agreement is {watermark, idle}.
local function is_ahead(reached, output, idle, is_source)
  return reached[1] > output or (is_source and reached[2] ~= idle)
end

