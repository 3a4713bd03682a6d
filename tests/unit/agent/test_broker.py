"""The id of a broker's cluster, as the tools of Kafka take it."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from uuid import UUID

from spark_agent.demo.broker import new_cluster_id


def test_a_cluster_id_is_not_taken_for_an_option() -> None:
    # In base64, six bits of ones but the last are a hyphen.
    drawn = [UUID(int=0xF8 << 120), UUID(int=0xFB << 120), UUID(int=7)]
    remaining = iter(drawn)
    found = new_cluster_id(lambda: next(remaining))
    assert urlsafe_b64decode(found + "==") == drawn[-1].bytes
    assert not next(remaining, None)
