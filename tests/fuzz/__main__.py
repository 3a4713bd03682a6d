"""`python -m tests.fuzz`: sends made-up requests to a service that it starts."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.fuzz.runner import Fuzzer

console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**32), help="of an earlier run"
    )
    options = parser.parse_args()
    console.print(f"seed {options.seed}: repeat it with --seed {options.seed}")
    began = time.monotonic()

    def tell(text: str) -> None:
        console.print(f"{time.monotonic() - began:6.0f} s  {text}")

    with tempfile.TemporaryDirectory(prefix="tidegauge-fuzz-") as folder:
        try:
            Fuzzer(Path(folder), options.seed).run(options.requests, tell)
        except AssertionError as error:
            sys.exit(f"seed {options.seed}: {error}")


if __name__ == "__main__":
    main()
