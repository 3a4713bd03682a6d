"""Build a release: the distributions, their checks, the bill of materials and the digests.

The wheel is made of the source distribution, installed in a fresh environment with the locked versions,
and its service answers there. Nothing leaves the machine: the last lines name the commands that publish.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("airflow", "dagster")
"""Folders of packages that are released beside tidegauge, with the same version."""
EXTRAS = "production,otel"
"""The bill of materials has all that a service in production consists of."""

Print = Callable[[str], None]


def main(arguments: Sequence[str], show: Print) -> int:
    """Build; return the exit code: 0, or 1 if the sources or the results are not those of a release."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="new folder of the results")
    parser.add_argument(
        "--rehearse", action="store_true", help="build from unfinished sources, too"
    )
    options = parser.parse_args(arguments)
    # Each distribution is built in a folder of its own.
    options.out = options.out.resolve()
    version = project_version()
    found = list(objections(version))
    for each in found:
        show(f"not a release: {each}")
    if options.out.exists():
        show(f"{options.out.name} exists: remove the folder, or name another with --out")
        return 1
    if found and not options.rehearse:
        show("change the sources, or build with --rehearse")
        return 1
    try:
        build(version, options.out, show)
    except subprocess.CalledProcessError as error:
        show(f"{error}\n{error.stdout or ''}{error.stderr or ''}")
        return 1
    for line in next_steps(version, options.out):
        show(line)
    return 0


def project_version() -> str:
    """Return the version that `pyproject.toml` states."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def objections(version: str) -> Iterator[str]:
    """Yield the reasons why the sources are not those of a release."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(version)}\b", changes, re.MULTILINE):
        yield f"CHANGELOG.md has not a section '## {version}'"
    if re.search(r"^## Unreleased\n+-", changes, re.MULTILINE):
        yield f"CHANGELOG.md has lines under 'Unreleased': move the lines under '## {version}'"
    if run("git", "status", "--porcelain"):
        yield "files differ from the commit: commit, or stash"
    if run("git", "tag", "--list", f"v{version}"):
        yield f"the tag v{version} exists: raise the version in pyproject.toml"


def build(version: str, out: Path, show: Print) -> None:
    """Build all files of a release into a new folder. Raises `CalledProcessError`."""
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        show("1/5 distributions")
        build_distributions(out, folder)
        show("2/5 their metadata")
        run("twine", "check", "--strict", *sorted(map(str, out.iterdir())))
        show("3/5 an installation in a fresh environment")
        python = install(next(out.glob("tidegauge-*.whl")), folder)
        show("4/5 a request to its service")
        check_service(python.with_name("tidegauge"), folder)
        show("5/5 bill of materials and digests")
        write_bill(python, out / f"tidegauge-{version}.cdx.json")
    write_digests(out)


def build_distributions(out: Path, folder: Path) -> None:
    """Build the source distribution, the wheel from it, and the wheels of the other packages."""
    hatch(ROOT, "sdist", out)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "sources", filter="data")
    [sources] = (folder / "sources").iterdir()
    hatch(sources, "wheel", out)
    for package in PACKAGES:
        hatch(ROOT / "deploy" / package, "wheel", out)


def hatch(sources: Path, form: str, out: Path) -> None:
    """Build one distribution. The same commit gives the same bytes."""
    epoch = run("git", "log", "-1", "--format=%ct")
    command = ("hatchling", "build", "-t", form, "-d", str(out))
    run(*command, folder=sources, SOURCE_DATE_EPOCH=epoch)


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel with the locked versions of what it needs; return the environment's Python."""
    python = folder / "environment" / "bin" / "python"
    run("uv", "venv", "--python", sys.executable, str(folder / "environment"))
    install = ("uv", "pip", "install", "--python", str(python))
    run(*install, f"{wheel}[{EXTRAS}]", "--constraint", str(ROOT / "requirements.lock"))
    run("uv", "pip", "check", "--python", str(python))
    return python


def check_service(tidegauge: Path, folder: Path) -> None:
    """Start the installed service, and list its jobs with the installed command."""
    command = [
        str(tidegauge),
        "serve",
        "--port",
        "0",
        "--ledger-url",
        f"sqlite+aiosqlite:///{folder}/ledger.db",
    ]
    serving = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        run(str(tidegauge), "jobs", "--url", address(serving), folder=folder)
    finally:
        serving.terminate()
        serving.communicate(timeout=60)


def address(serving: subprocess.Popen[str]) -> str:
    """Return the address that a starting service prints. Raises `CalledProcessError` if it ends."""
    lines: list[str] = []
    for line in serving.stdout or ():
        lines.append(line)
        if found := re.search(r"listens on (http\S+)", line):
            return found[1]
    raise subprocess.CalledProcessError(serving.wait(), "tidegauge serve", "".join(lines))


def write_bill(python: Path, path: Path) -> None:
    """Write the components of an environment in the format of CycloneDX, which is validated."""
    command = ("cyclonedx-py", "environment", "--pyproject", str(ROOT / "pyproject.toml"))
    epoch = run("git", "log", "-1", "--format=%ct")
    run(
        *command,
        "--output-reproducible",
        "--validate",
        "-o",
        str(path),
        str(python),
        SOURCE_DATE_EPOCH=epoch,
    )


def write_digests(out: Path) -> None:
    """Write the SHA-256 of each file, in the format of `sha256sum --check`."""
    files = sorted(out.iterdir())
    lines = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in files]
    (out / "SHA256SUMS").write_text("".join(lines))


def next_steps(version: str, out: Path) -> Iterator[str]:
    """Yield the lines that end a build."""
    yield f"built in {out}:"
    for each in sorted(out.iterdir()):
        yield f"  {each.name}  ({each.stat().st_size / 1_000:,.0f} kB)"
    yield f"next: git tag --sign v{version} && git push origin v{version}"
    yield f"      twine upload {out}/*.whl {out}/*.tar.gz"


def run(program: str, *arguments: str, folder: Path = ROOT, **variables: str) -> str:
    """Run a program, this environment's own first; return its output. Raises `CalledProcessError`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = shutil.which(program, path=path)
    if found is None:
        raise subprocess.CalledProcessError(127, program, stderr=f"not installed: {program}")
    done = subprocess.run(
        [found, *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], lambda line: print(line, flush=True)))
