"""Examining Redis: does it answer, take writes, and have the settings that this program relies on?"""

from __future__ import annotations

from collections.abc import Sequence

from service.clock import Clock
from service.errors import UnavailableError
from service.live.redis import schema
from service.live.redis.client import RedisClient
from service.model.findings import Finding, compare_clocks

_OLDEST = (6, 2)


async def examine(url: str, clock: Clock) -> Sequence[Finding]:
    """Look at the server behind this URL. Raises `StoreRefusedError` if the URL cannot be used."""
    client = RedisClient(url)
    try:
        return await _examine(client, clock)
    except UnavailableError as error:
        return [Finding("live store", "fault", f"{error.detail}: is TIDEGAUGE_LIVE_URL right?")]
    finally:
        await client.close()


async def _examine(client: RedisClient, clock: Clock) -> list[Finding]:
    missing = await client.missing_rights()
    if missing:
        return [
            Finding(
                "live store's rights",
                "fault",
                f"its user may not use {', '.join(missing)}: grant it (docs/service/production.md)",
            )
        ]
    await client.probe(schema.PROBE)
    found = [
        Finding("live store", "ok", "answers, and takes writes"),
        Finding("live store's rights", "ok", "its user may do all that is needed"),
    ]
    info = _fields(await client.command("INFO"))
    version = info.get("redis_version", "0")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    old = numbers < _OLDEST
    advice = ": 6.2 is the oldest that is tested, upgrade" if old else ""
    found.append(
        Finding("live store's version", "warning" if old else "ok", f"Redis {version}{advice}")
    )
    policy = info.get("maxmemory_policy", "noeviction")
    found.append(
        Finding("live store's eviction", "ok", "maxmemory-policy is noeviction")
        if policy == "noeviction"
        else Finding(
            "live store's eviction",
            "warning",
            f"maxmemory-policy is {policy}: set noeviction, since an evicted key costs a job its leases",
        )
    )
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if limit and used > 0.9 * limit:
        found.append(
            Finding(
                "live store's memory",
                "warning",
                f"{used:,} of {limit:,} bytes are used: raise maxmemory before reports are refused",
            )
        )
    asked_ms = clock.wall_ms()
    seconds, micros = await client.command("TIME")
    theirs_ms = int(seconds) * 1_000 + int(micros) // 1_000
    found.append(compare_clocks("live store's clock", theirs_ms, asked_ms, clock.wall_ms()))
    return found


def _fields(reply: bytes | dict[str, object]) -> dict[str, str]:
    if isinstance(reply, dict):
        return {name: str(value) for name, value in reply.items()}
    lines = (line.partition(":") for line in reply.decode().splitlines())
    return {name: value for name, colon, value in lines if colon}
