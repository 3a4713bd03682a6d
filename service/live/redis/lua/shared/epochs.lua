-- Reports that wait for the commit of their epoch.

local function waiting_epochs(st)
  local raw = call('HGET', st.keys.state, 'waiting')
  return raw and cmsgpack.unpack(raw) or {}
end

-- Drops what waits for epochs up to this one (nil: for any).
local function drop_waiting(st, upto)
  local kept = {}
  for _, epoch in ipairs(waiting_epochs(st)) do
    if upto and epoch > upto then
      kept[#kept + 1] = epoch
    else
      local blocks = cmsgpack.unpack(call('HGET', st.keys.waiting, epoch) or cmsgpack.pack({}))
      for _, block in ipairs(blocks) do call('HDEL', st.keys.waiting, epoch .. ':' .. block) end
      call('HDEL', st.keys.waiting, epoch)
    end
  end
  if #kept > 0 then
    call('HSET', st.keys.state, 'waiting', cmsgpack.pack(kept))
  else
    call('HDEL', st.keys.state, 'waiting')
  end
end

