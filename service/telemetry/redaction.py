"""Passwords kept out of logs and errors."""

from __future__ import annotations

import re
from typing import Final

_HIDDEN: Final = "***"

_LOGIN: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<login>\S*@)")
"""Up to the last `@`: a password may have any character, and whoever forgot to quote one must not see
half of it in his logs.
"""

_OPTION: Final = re.compile(
    r"(?P<name>\b\w*(?:passw|passphrase|secret|token|credential)\w*=)(?P<value>[^\s&'\"]+)",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Hide the passwords of all URLs in a text, wherever in them they are.

    >>> redact("cannot use 'redis://user:p@ss/w:rd@host:6379/0?ssl=1': no such host")
    "cannot use 'redis://user:***@host:6379/0?ssl=1': no such host"
    >>> redact("postgresql://host/db?user=me&password=hunter2&sslmode=require")
    'postgresql://host/db?user=me&password=***&sslmode=require'
    >>> redact("http://127.0.0.1:8000/docs")
    'http://127.0.0.1:8000/docs'
    """
    return _OPTION.sub(rf"\g<name>{_HIDDEN}", _LOGIN.sub(_hide_login, text))


def shown(url: str) -> str:
    """Return what a setting that should be a URL may be shown as.

    >>> shown("redis://:secret@host"), shown("secret")
    ("'redis://:***@host'", '(no URL)')
    """
    return repr(redact(url)) if "://" in url else "(no URL)"


def _hide_login(match: re.Match[str]) -> str:
    user, colon, _ = match["login"].partition(":")
    # Without a colon all of it is a user's name, which some use for a token.
    return f"{match['scheme']}{user if colon else _HIDDEN}{colon and ':' + _HIDDEN}@"
