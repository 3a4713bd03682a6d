-- The published views.

-- Publishes a view unless a newer one is published already.
local function publish_view(name, raw)
  local current = call('HGET', VIEWS, name)
  if not current then return false end
  if unpack_view(raw)[VIEW_VERSION] <= unpack_view(current)[VIEW_VERSION] then return false end
  call('HSET', VIEWS, name, raw)
  return true
end

local function publish_revision(revision)
  if tonumber(call('HGET', META, 'revision')) < tonumber(revision) then
    call('HSET', META, 'revision', revision)
  end
end

