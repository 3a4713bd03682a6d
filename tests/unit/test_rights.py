"""Refusals of Redis for want of a right, in the words of each version."""

from __future__ import annotations

import pytest

from service.live.redis.rights import DENIED, denied

MAY_NOT_RUN = "this user has no permissions to run the"
LATER = "NOPERM ACL failure in script: {} script: 4cb9, on @user_script:2."
SCRIPT = "local call = redis.call\nlocal time = call('TIME')\ncall('ZADD', KEYS[1], 0, 'm')"
IN_SCRIPT = (
    "Error running script (call to f_4cb9): @user_script:{0}: @user_script: {0}: The user executing"
)


@pytest.mark.parametrize(
    ("words", "source", "right", "torn"),
    [
        # 6.2, a plain command, and the script as such.
        (f"NOPERM {MAY_NOT_RUN} 'time' command or its subcommand", None, "TIME", False),
        (f"NOPERM {MAY_NOT_RUN} 'evalsha' command or its subcommand", SCRIPT, "EVALSHA", False),
        (
            "NOPERM this user has no permissions to access one of the keys used as arguments",
            SCRIPT,
            "the keys k:*",
            False,
        ),
        (
            "NOPERM this user has no permissions to access one of the channels used as arguments",
            None,
            "the channels c:*",
            False,
        ),
        # 6.2, from within a script: no NOPERM, and no name.
        (
            f"{IN_SCRIPT.format(2)} the script can't run this command or subcommand",
            SCRIPT,
            "TIME",
            False,
        ),
        (
            f"{IN_SCRIPT.format(3)} the script can't run this command or subcommand",
            SCRIPT,
            "ZADD",
            True,
        ),
        (
            f"{IN_SCRIPT.format(9)} the script can't run this command or subcommand",
            SCRIPT,
            "a command",
            True,
        ),
        (
            f"{IN_SCRIPT.format(3)} the script can't access at least one of the keys mentioned",
            SCRIPT,
            "the keys k:*",
            True,
        ),
        (
            f"{IN_SCRIPT.format(3)} the script can't publish to the channel mentioned in the command",
            SCRIPT,
            "the channels c:*",
            False,
        ),
        # 7 and later.
        (
            "NOPERM User app has no permissions to run the 'client|setname' command",
            None,
            "CLIENT SETNAME",
            False,
        ),
        ("NOPERM No permissions to access a key", SCRIPT, "the keys k:*", False),
        (
            "NOPERM User app has no permissions to access the 'c:x' channel",
            None,
            "the channels c:*",
            False,
        ),
        (
            LATER.format("User app has no permissions to run the 'time' command"),
            SCRIPT,
            "TIME",
            False,
        ),
        (
            LATER.format("User app has no permissions to run the 'zadd' command"),
            SCRIPT,
            "ZADD",
            True,
        ),
        (LATER.format("No permissions to access a channel"), SCRIPT, "the channels c:*", False),
    ],
)
def test_the_right_is_named_in_the_words_of_each_version(
    words: str, source: str | None, right: str, torn: bool
) -> None:
    assert DENIED.search(words)
    found = denied(words, "c:*", "k:*", source=source)
    assert (found.right, found.may_have_written) == (right, torn)
    assert right in found.detail
    assert found.status == 503


@pytest.mark.parametrize(
    "words",
    [
        "ERR Error running script (call to f_4cb9): @user_script:2: Script attempted to access a field",
        "LOST",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
    ],
)
def test_nothing_else_is_taken_for_a_refusal(words: str) -> None:
    assert DENIED.search(words) is None
