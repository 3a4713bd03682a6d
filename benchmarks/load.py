"""Load from a process of its own: wrk with a Lua script where it is installed, else Python."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

CONNECTIONS = 16
VALUE = "@"
"""Stands in a body for a number that rises with each request."""
RANGE = "#"
"""Stands in a body for one of `Target.ranges`, the next one with each request."""
TOKEN = "$"
"""Stands in a body for one of `Target.tokens`: each connection has its own, as each worker has."""
COLUMN = "~"
"""Stands in a body for a column of `Target.rows` times as bytes, each the number that rises."""

LUA = """
local file = assert(io.open(%(body)s, "rb"))
local body = file:read("*a")
file:close()
local ranges = {}
for name in io.lines(%(ranges)s) do ranges[#ranges + 1] = name end
local tokens = {}
for token in io.lines(%(tokens)s) do tokens[#tokens + 1] = token end
local parts = {}
local value, turn = %(first)d, 0
local rows, standing = %(rows)d, %(standing)s
local alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
local function base64(times)
  local bytes, text = {}, {}
  for _, time in ipairs(times) do
    for _ = 1, 8 do
      bytes[#bytes + 1] = time %% 256
      time = math.floor(time / 256)
    end
  end
  for at = 1, #bytes, 3 do
    local sum = bytes[at] * 65536 + (bytes[at + 1] or 0) * 256 + (bytes[at + 2] or 0)
    local known = math.min(#bytes - at + 2, 4)
    for place = 1, 4 do
      local digit = math.floor(sum / 64 ^ (4 - place)) %% 64 + 1
      text[#text + 1] = place <= known and alphabet:sub(digit, digit) or "="
    end
  end
  return table.concat(text)
end
local function column()
  local head = base64({standing and 1 or value, value, value})
  local rest = {}
  for k = 1, rows %% 3 do rest[k] = value end
  return head .. base64({value, value, value}):rep(math.floor(rows / 3) - 1) .. base64(rest)
end
wrk.method = %(method)s
wrk.headers["Content-Type"] = "application/json"
if %(key)s ~= "" then wrk.headers["Authorization"] = "Bearer " .. %(key)s end
if %(etag)s ~= "" then wrk.headers["If-None-Match"] = %(etag)s end
local threads = 0
setup = function(thread)
  threads = threads + 1
  thread:set("place", threads)
end
init = function()
  if #tokens > 0 then body = body:gsub("%%$", tokens[place]) end
  for part in (body .. "@"):gmatch("([^@]*)@") do parts[#parts + 1] = part end
  if #body > 0 then wrk.body = body end
end
if body:find("[@~]") or #ranges > 0 then
  request = function()
    value, turn = value + 1, turn + 1
    local text = table.concat(parts, string.format("%%d", value))
    if #ranges > 0 then text = text:gsub("#", ranges[turn %% #ranges + 1], 1) end
    if rows > 0 then text = text:gsub("~", column(), 1) end
    return wrk.format(nil, nil, nil, text)
  end
end
done = function(summary)
  local e = summary.errors
  local bad = e.status + e.connect + e.read + e.write + e.timeout
  io.write(string.format("RESULT %%d %%d %%d\\n", summary.requests, summary.duration, bad))
end
"""


@dataclass(frozen=True)
class Target:
    """A request that is sent again and again."""

    url: str
    method: str = "GET"
    body: str = ""
    """`VALUE`, `RANGE`, `COLUMN` in it are filled in for each request, `TOKEN` for each connection."""
    ranges: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    first: int = 1_767_225_600_000
    rows: int = 0
    """At least three, if there is a `COLUMN`."""
    standing: bool = False
    """The first entry of `COLUMN` is 1, whatever the others are."""
    key: str = ""
    """Key of the requests, if any."""
    etag: str = ""
    """ETag that the client has, if any: 304 is a success."""


@dataclass(frozen=True)
class Outcome:
    """Number of responses with 2xx or 304, and their time."""

    requests: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


class LoadFailedError(RuntimeError):
    """Some answers were no success: the rate would mean nothing."""


def generator() -> str:
    """Return the name of the load generator."""
    return "wrk" if shutil.which("wrk") else "python"


def run(target: Target, seconds: float, *, connections: int = CONNECTIONS) -> Outcome:
    """Keep some connections busy for a while."""
    use = _wrk if shutil.which("wrk") else _python
    outcome = use(target, seconds, connections)
    if outcome.requests == 0:
        raise LoadFailedError(f"{target.url}: no answers")
    return outcome


def _wrk(target: Target, seconds: float, connections: int) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="tidegauge-bench-") as name:
        folder = Path(name)
        (folder / "body").write_text(target.body)
        (folder / "ranges").write_text("".join(f"{one}\n" for one in target.ranges))
        (folder / "tokens").write_text("".join(f"{one}\n" for one in target.tokens))
        (folder / "load.lua").write_text(
            LUA
            % {
                "body": json.dumps(str(folder / "body")),
                "ranges": json.dumps(str(folder / "ranges")),
                "tokens": json.dumps(str(folder / "tokens")),
                "method": json.dumps(target.method),
                "first": target.first,
                "rows": target.rows,
                "standing": json.dumps(target.standing),
                "key": json.dumps(target.key),
                "etag": json.dumps(target.etag),
            }
        )
        threads = connections if target.tokens else 1
        done = subprocess.run(
            [
                *("wrk", f"-t{threads}", f"-c{connections}", f"-d{max(1, round(seconds))}s"),
                *("--timeout", "30s", "-s", str(folder / "load.lua"), target.url),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    words = [line.split() for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not words:
        raise LoadFailedError(f"{target.url}: wrk said {done.stdout}{done.stderr}")
    requests, microseconds, bad = map(int, words[0][1:])
    if bad:
        raise LoadFailedError(f"{target.url}: {bad} of {requests} failed")
    return Outcome(requests, microseconds / 1e6)


def _python(target: Target, seconds: float, connections: int) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pyload", str(seconds), str(connections)],
        input=json.dumps(asdict(target)),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    if done.returncode:
        raise LoadFailedError(f"{target.url}: {done.stderr[-2000:]}")
    requests, took = json.loads(done.stdout)
    return Outcome(requests, took)
