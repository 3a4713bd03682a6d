"""The profile: the service's URL and the key, as defaults of the commands' options.

The file is TOML, `~/.config/tidegauge/config.toml` or the path in `TIDEGAUGE_CONFIG`.
`--profile` or `TIDEGAUGE_PROFILE` names a table in the file, by default `default`:

```toml
[default]
url = "https://gauge.example"
key_file = "~/.config/tidegauge/key"
```
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from spark_agent.client.credentials import read_text

CONFIG_VARIABLE: Final = "TIDEGAUGE_CONFIG"
PROFILE_VARIABLE: Final = "TIDEGAUGE_PROFILE"
_MEMBERS: Final = {"url", "key_file"}


@dataclass(frozen=True, slots=True)
class Profile:
    """Defaults of the commands' options."""

    url: str | None = None
    key_file: str | None = None


def read_profile(
    environment: Mapping[str, str] = os.environ, *, name: str | None = None
) -> Profile:
    """Read a profile: `name`, or the environment's. Without a file it is empty. Raises `ValueError`."""
    named = environment.get(CONFIG_VARIABLE)
    home = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = Path(named) if named else home / "tidegauge" / "config.toml"
    chosen = name or environment.get(PROFILE_VARIABLE)
    try:
        content = tomllib.loads(read_text(path))
    except FileNotFoundError:
        if named or chosen:
            raise ValueError(f"the profile file {str(path)!r} does not exist") from None
        return Profile()
    except (OSError, ValueError) as error:
        raise ValueError(f"the profile file {str(path)!r} cannot be read: {error}") from None
    return _profile(content, chosen or "default", path, must_be=chosen is not None)


def _profile(content: Mapping[str, Any], name: str, path: Path, *, must_be: bool) -> Profile:
    table: Any = content.get(name)
    if table is None and not must_be:
        return Profile()
    if not isinstance(table, dict):
        raise ValueError(  # noqa: TRY004
            f"{str(path)!r} has no profile {name!r}: it has {', '.join(content) or 'none'}"
        )
    members = cast("dict[str, Any]", table)
    for member, value in members.items():
        if member not in _MEMBERS:
            raise ValueError(
                f"{str(path)!r}: profile {name!r} has {member!r}: it may have url and key_file"
            )
        if not isinstance(value, str):
            raise ValueError(  # noqa: TRY004
                f"{str(path)!r}: {member} of profile {name!r} is {value!r}: write it in quotes"
            )
    key_file = members.get("key_file")
    return Profile(
        members.get("url"), None if key_file is None else str(Path(key_file).expanduser())
    )
