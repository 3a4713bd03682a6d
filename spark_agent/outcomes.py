"""The outcomes of a question to the service, in words and as exit codes of the commands."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class WaitOutcome(StrEnum):
    """The outcome of waiting for a watermark. The words are those of `--json`, errors and logs."""

    REACHED = "reached"
    NOT_IN_TIME = "not in time"
    CANNOT_BE_ASKED = "cannot be asked"
    """The service does not answer. A retry may help."""
    WRONG = "wrong"
    """The job, the stage, the instant, the key or the address is wrong. A retry does not help."""


EXIT_NOT_IN_TIME: Final = 3
EXIT_CANNOT_BE_ASKED: Final = 4
EXIT_WRONG: Final = 5
EXIT_NOT_INSTALLED: Final = 6
"""A package is missing that the command needs."""
# 1 is left to the interpreter and to a refused confirmation, 2 to a typing error.

EXIT_CODES: Final = {
    WaitOutcome.REACHED: 0,
    WaitOutcome.NOT_IN_TIME: EXIT_NOT_IN_TIME,
    WaitOutcome.CANNOT_BE_ASKED: EXIT_CANNOT_BE_ASKED,
    WaitOutcome.WRONG: EXIT_WRONG,
}
