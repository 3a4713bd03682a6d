"""The drawings of the site are those that their program draws."""

from __future__ import annotations

import pytest

from docs import scaling
from docs.drawings import DRAWINGS, FOLDER


@pytest.mark.parametrize("path", list(DRAWINGS))
def test_drawings_are_drawn_by_their_program(path: str) -> None:
    drawn = DRAWINGS[path]()
    assert (FOLDER / path).read_text() == drawn, "run python -m docs.drawings"


def test_tables_of_measured_results_are_those_that_were_saved() -> None:
    page = (FOLDER / scaling.PAGE).read_text()
    assert scaling.filled(page) == page, "run python -m docs.drawings"
