"""Users of Redis with exactly the rights that `docs/service/production.md` lists, or fewer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.support.redis_server import RedisCluster, RedisServer
from tests.support.server import ROOT

PASSWORD = "hush"
PAGE = ROOT / "docs/service/production.md"


def documented_rights() -> Sequence[str]:
    """The rules of the user in the page, without its name and password."""
    text = PAGE.read_text()
    [found] = re.findall(
        r"^ *ACL SETUSER tidegauge on #SHA256 (.*(?:\n +[+~&].*)*)", text, re.MULTILINE
    )
    return found.split()


def grant(server: RedisServer, name: str, rules: Sequence[str]) -> str:
    """Give a user these rights and no others; return the URL to connect as it."""
    server.command("ACL", "SETUSER", name, "reset", "on", f">{PASSWORD}", *rules)
    return f"redis://{name}:{PASSWORD}@127.0.0.1:{server.port}"


def documented(server: RedisServer) -> str:
    """Return the URL to connect as the user that the page describes."""
    return grant(server, "documented", documented_rights())


def documented_in_cluster(cluster: RedisCluster) -> str:
    """Likewise, with the rights that the page adds for a Cluster."""
    text = PAGE.read_text()
    [more] = re.findall(r"in a Cluster\s+it also needs `([^`]+)`", text)
    for node in cluster.nodes:
        grant(node, "documented", [*documented_rights(), *more.split()])
    return cluster.url.replace("://", f"://documented:{PASSWORD}@", 1)
