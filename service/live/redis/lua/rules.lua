-- The rules of service/frontier that a step judges by: each mirrors the Python function of the same name,
-- and one table of vectors holds the two together. No function here asks the server anything.
--
-- Instants and fences are doubles. Runs and the parts of a rank are texts of one length, so that they
-- compare as the numbers do. A missing value is nil, false or '', where Python has None.

-- ---- leases

local function is_current(deadline, now) return now < deadline end

local function takes_over(rank, held_by, same_holder) return same_holder or rank > held_by end

local function continues_watch(watched, before) return watched and before end

local function held_moment(now, watched) return watched and now or -now - 1 end

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

-- What waits is {promise, capped at commit, idle, fence, facts, unfinished}.
local function join_attempts(earlier, later)
  local promises_nothing = earlier[1] == MIN and later[1] == MIN
  return {
    math.min(earlier[1], later[1]),
    earlier[2] or later[2],
    earlier[3] and later[3] and (promises_nothing or earlier[4] == later[4]),
    later[4],
    (later[1] <= earlier[1] and later or earlier)[5],
    earlier[6] or later[6],
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

-- An agreement is {watermark, idle}. Here, MAX is the weight of no active member.
local function agree(lowest, idle, lowest_idle)
  if lowest < MAX then return {lowest, false} end
  if idle > 0 then return {lowest_idle, true} end
  return {MAX, false}
end

local function are_idle_together(total, idle, final) return idle > 0 and idle + final == total end

local function agree_keyed(lowest, total, idle, final)
  return {lowest, are_idle_together(total, idle, final)}
end

local function leaves_out(idle, retired, keyed) return retired > 0 or (idle > 0 and not keyed) end

-- Both are numbers; `returned_at` is nil or false if no member has returned.
local function awaits_revision(returned_at, revision)
  return returned_at and revision <= returned_at or false
end

local function is_ahead(reached, output, idle)
  return reached[1] > output or reached[2] ~= idle
end

-- ---- facts

-- What is reported is {oldest work, records, late, backlog, pending, keeps back}, what a range has said so
-- far {reported at, interval, oldest work, backlog, quiet since, pending, keeps back}. MIN stands for no
-- moment, and -1 for records that are not counted.
local function is_unfinished(keeps_back, backlog, oldest_work, pending)
  return keeps_back or backlog > 0 or oldest_work ~= MIN or (pending or '') ~= ''
end

local function is_quiet(reported) return reported[2] == 0 and reported[4] == 0 end

local function merge_facts(earlier, reported, now, wall)
  return {
    wall,
    earlier and earlier[1] ~= 0 and wall - earlier[1] or -1,
    math.min(reported[1], wall),
    reported[4],
    earlier and is_quiet(reported) and earlier[5] or now,
    reported[5] or (earlier and earlier[6]) or false,
    reported[6] or false,
  }
end


-- ---- idleness

-- A series of commits is {since, last, count, before the last, arrived}.
local function next_commit(series, now, after, age)
  local at = now - age
  if not series or now < series[5] or now - series[5] >= after then return {now, at, 1, at, now} end
  return {series[1], at, series[3] + 1, math.min(series[2], at), now}
end

local function repeat_commit(series, now, age)
  local last = math.min(series[2], now - age)
  return {series[1], last, series[3], math.min(series[4], last), series[5]}
end

local function is_void(series, now) return series and now < series[5] or false end

local function after_set_back(given, now, quiet) return given <= now and given or now - quiet end

local function stays_idle(was_idle_by_policy, reported_nothing)
  return was_idle_by_policy and reported_nothing
end
