-- What readers are shown.

-- Shows a view unless a newer one is shown already.
local function show(name, raw)
  local current = call('HGET', VIEWS, name)
  if not current then return false end
  if shown(raw)[4] <= shown(current)[4] then return false end
  call('HSET', VIEWS, name, raw)
  return true
end

local function show_revision(revision)
  if tonumber(call('HGET', META, 'revision')) < tonumber(revision) then
    call('HSET', META, 'revision', revision)
  end
end

