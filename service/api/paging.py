"""Pages of lists that grow: `limit` and `cursor` of a request, and the `next` of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from msgspec import UNSET, UnsetType

from service.api.descriptions import query
from service.api.exchange import check_name, integer

T = TypeVar("T")

MAX_PAGE = 10_000


def cursor_parameter(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Describe the cursor."""
    return query("cursor", "The `next` of the page before; the first page by default", schema)


PAGE_BY_NAME = (
    query(
        "limit",
        "Number of entries; all by default",
        {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    ),
    cursor_parameter({"type": "string", "maxLength": 128}),
)
"""Parameters of a list in the order of names."""


def page_by_name(
    request: Request, found: Iterable[T], name: Callable[[T], str]
) -> tuple[list[T], str | UnsetType]:
    """Return a page of a list, and the cursor of the next one. Raises `InvalidRequestError`.

    The cursor is the last name, so entries that are added or deleted meanwhile shift nothing.
    """
    limit = integer(request, "limit", 1, MAX_PAGE, None)
    cursor = request.query_params.get("cursor")
    if cursor is not None:
        check_name("cursor", cursor)
    entries = sorted((each for each in found if cursor is None or name(each) > cursor), key=name)
    return first_page(entries, limit, name)


def first_page(
    entries: list[T], limit: int | None, cursor: Callable[[T], str]
) -> tuple[list[T], str | UnsetType]:
    """Return at most `limit` entries, and the cursor of the last one if there are more.

    >>> first_page(["a", "b", "c"], 2, str)
    (['a', 'b'], 'b')
    >>> first_page(["c"], 2, str)
    (['c'], UNSET)
    """
    if limit is None or len(entries) <= limit:
        return entries, UNSET
    return entries[:limit], cursor(entries[limit - 1])
