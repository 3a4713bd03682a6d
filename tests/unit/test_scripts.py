"""Scripts of the steps in Redis."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.live.redis import client


def test_a_step_without_a_script_is_an_error_of_the_program() -> None:
    """As an error of the file system, it was retried as a Redis that does not answer."""
    with pytest.raises(KeyError, match="no_such_step"):
        client._script("no_such_step")


def test_every_script_is_named_by_a_step() -> None:
    package = Path(client.__file__).parent
    named = set(re.findall(r'"([a-z_]+)"', "".join(p.read_text() for p in package.glob("*.py"))))
    assert {path.stem for path in client.LUA.glob("*.lua")} <= named
