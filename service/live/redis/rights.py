"""The rights that this program needs of Redis, and the words of a refusal for want of one.

A user without the right to one command looks like a damaged state to whoever reads only the scripts'
results: older servers do not say NOPERM from within a script.
"""

from __future__ import annotations

import re
from typing import Final

from service.errors import UnavailableError

DENIED: Final = re.compile(
    r"NOPERM|no permissions|The user executing the script can't"
    r"|can't run this command|can't access at least one of the keys|can't publish to the channel"
)
"""The words of a refusal, of servers from 6.2 on."""

_COMMAND: Final = re.compile(r"run the '([^']+)' command")
_LINE: Final = re.compile(r"@?user_script:\s?(\d+)")
_CALL: Final = re.compile(r"call\(\s*'([A-Z]+)'")

WRITES_NOTHING: Final = frozenset({"TIME", "PUBLISH"})
"""The first and the last command of a script: one that is refused these has written nothing, or all."""


class DeniedError(UnavailableError):
    """A store does not answer; retry."""

    def __init__(self, right: str, words: str, *, in_script: bool = False) -> None:
        super().__init__(
            f"the live store's user may not use {right}: grant it (docs/service/production.md);"
            f" {words}"
        )
        self.right = right
        self.words = words
        self.may_have_written = in_script and right not in WRITES_NOTHING
        """True if a script may have stopped in the middle: a script is not rolled back."""


def denied(words: str, channels: str, keys: str, *, source: str | None = None) -> DeniedError:
    r"""Read a refusal: name the command, the channel or the keys that the user has no right to.

    `source` is the script that was refused; None: it was a plain command.

    >>> denied("User x has no permissions to run the 'time' command", "c:*", "k:*").right
    'TIME'
    >>> denied("No permissions to access a channel", "c:*", "k:*").right
    'the channels c:*'
    >>> old = "@user_script:2: The user executing the script can't run this command or subcommand"
    >>> denied(old, "c:*", "k:*", source="local x\ncall('TIME')").right
    'TIME'
    """
    # EVALSHA itself, or one of its keys, is refused before the script begins.
    in_script = source is not None and "script" in words
    if (named := _COMMAND.search(words)) is not None:
        return DeniedError(named[1].upper().replace("|", " "), words, in_script=in_script)
    if "channel" in words:
        right = f"the channels {channels}"
        # Every script publishes last, or not at all.
        return DeniedError(right, words)
    if "key" in words:
        return DeniedError(f"the keys {keys}", words, in_script=in_script)
    right = "a command"
    if source is not None and (line := _LINE.search(words)) is not None:
        lines = source.splitlines()
        found = _CALL.findall(lines[int(line[1]) - 1]) if int(line[1]) <= len(lines) else []
        right = " or ".join(dict.fromkeys(found)) or right
    return DeniedError(right, words, in_script=in_script)
