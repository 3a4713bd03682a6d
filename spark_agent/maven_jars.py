"""Jars that PyPI does not have: fetched once with Maven, checked, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TIMEOUT_S: Final = 300


class JarsUnavailableError(Exception):
    """Jars that cannot be fetched here, with the reason and what would help."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Jars of a `pom.xml`, which has a profile for each part, with their digests."""

    name: str
    """Beginning of the folder's name in the cache."""
    contents: str
    """Name of the contents in messages."""
    pom: Path
    digests: Path
    """SHA-256 and file of each jar, as `sha256sum` prints them, below the folder of its part."""
    parts: tuple[str, ...]

    def fetch(
        self,
        say: Callable[[str], None],
        *,
        cache: Path | None = None,
        environment: Mapping[str, str],
    ) -> Path:
        """Return the folder with a folder for each part. Raises `JarsUnavailableError`.

        The jars are fetched unless the cache has them. `say` takes lines of progress. In the cache,
        each version of the jars has a folder. Without `cache`, the user's cache is taken, by the
        `environment`.
        """
        folder = (cache or _cache(environment)) / f"{self.name}-{_digest(self.digests)[:16]}"
        if not folder.exists():
            self._fetch_into(folder, say)
        return folder

    def _fetch_into(self, folder: Path, say: Callable[[str], None]) -> None:
        maven = shutil.which("mvn")
        if maven is None:
            raise JarsUnavailableError(
                f"{self.contents} are fetched with Maven, and mvn is not on the PATH: install Maven 3"
            )
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JarsUnavailableError(
                f"the cache of {self.contents} cannot be written: {error}. Set XDG_CACHE_HOME to "
                f"another folder"
            ) from None
        # Complete when it gets its name: another process may fetch the same.
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            whole = Path(made) / "jars"
            for part in self.parts:
                say(f"fetching the jars of the {part} with Maven")
                self._run(maven, part, whole / part)
            self._check(whole)
            try:
                whole.rename(folder)
            except OSError:
                if not folder.exists():
                    raise

    def _run(self, maven: str, part: str, into: Path) -> None:
        command = [maven, "-q", "-B", "-f", str(self.pom), f"-P{part}"]
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={into}"]
        try:
            done = subprocess.run(  # noqa: S603  (arguments of our own)
                [*command, *goal, "-DincludeScope=runtime"],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise JarsUnavailableError(
                f"Maven has not fetched the jars of the {part} within {_TIMEOUT_S} s: check the "
                f"network, and try again"
            ) from None
        if done.returncode:
            line = next((line for line in done.stdout.splitlines() if "ERROR" in line), "")
            raise JarsUnavailableError(
                f"Maven cannot fetch the jars of the {part}: {line.removeprefix('[ERROR] ')[:300]}"
            )

    def _check(self, folder: Path) -> None:
        """Check that the jars are the expected ones. Raises `JarsUnavailableError`."""
        lines = (line.split("  ", 1) for line in self.digests.read_text().splitlines())
        expected = {name: digest for digest, name in lines}
        found = {str(jar.relative_to(folder)): _digest(jar) for jar in folder.glob("*/*.jar")}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise JarsUnavailableError(
                    f"Maven has fetched another {name} than expected, with the SHA-256 "
                    f"{found.get(name, 'none')} in place of {expected.get(name, 'none')}: check where "
                    f"Maven takes its artefacts from"
                )


def _cache(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tidegauge"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
