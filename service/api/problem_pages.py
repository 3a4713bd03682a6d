"""A page for each type of problem, at the address in its `type`.

The pages have no data of jobs, so they need no key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Final

from fastapi import FastAPI

from service import errors
from service.api.static import StaticFile
from service.errors import ProblemError

_AT_THE_START: Final = frozenset({errors.CannotStartError, errors.StoreRefusedError})
"""Errors that end a start: a response never has them."""

REMEDIES: Final[dict[type[ProblemError], str]] = {
    errors.ProblemError: "The service has a fault. Its log has the error; retry, and report the fault.",
    errors.MalformedJsonError: "Send JSON in UTF-8. The detail has the place of the first error.",
    errors.InvalidRequestError: "Change the value that the detail names. A repeated request is rejected"
    " again.",
    errors.InvalidPipelineSpecError: "Change the stage that the detail and the member `stage` name."
    " Check a specification with `POST …/check`, or with `tidegauge schema` in an editor.",
    errors.LimitReachedError: "Declare less, delete unused jobs, or raise the setting that the member"
    " `setting` names.",
    errors.InvalidReportError: "Change the value that the detail names: the report does not fit the type"
    " of its stage.",
    errors.ClientGoneError: "Nothing was changed. The client disconnected, so it does not receive this"
    " problem.",
    errors.PayloadTooLargeError: "Send the ranges in several requests.",
    errors.UnauthenticatedError: "Send `Authorization: Bearer` with a key that has not expired or been"
    " revoked.",
    errors.ForbiddenError: "Use a key with the role and for the job that the detail names.",
    errors.NotFoundError: "Compare the address with those at `/docs`.",
    errors.MethodNotAllowedError: "Use a method that the header `Allow` names.",
    errors.UnknownJobError: "Declare the job first, or correct its name. `GET /v1/jobs` lists jobs.",
    errors.UnknownStageError: "Correct the name, or declare the stage in the job's specification.",
    errors.UnknownRangeError: "Correct the name. `GET …/ranges` lists the stage's ranges.",
    errors.UnknownRunError: "Open a run with `POST …/runs`. `GET …/runs` lists the job's runs.",
    errors.UnknownKeyError: "Correct the name. `GET /v1/keys` lists the keys.",
    errors.KeyExistsError: "Choose another name, or revoke the key first.",
    errors.FirstKeyError: "Create a key with the role `admin`, for every job, before all others.",
    errors.PreconditionRequiredError: "Read the job, check that the change is right for it, and send its"
    " `ETag` as `If-Match`.",
    errors.PreconditionFailedError: "Somebody else has changed the job. Read it again, and repeat the"
    " change with the new `ETag`.",
    errors.StaleRunError: "Stop: a newer program executes the stage. The members `run` and `holder` name"
    " its run. Open a new run only to take the stage over.",
    errors.LeaseConflictError: "Wait for `expires_in_ms` of the member `denied`, or claim with a higher"
    " `run`, `epoch` or `attempt`.",
    errors.LeaseLostError: "Claim the ranges again, and report from there. The member `reason` is"
    " `expired`, `superseded`, `released` or `unknown`.",
    errors.InputAheadError: "Report the input watermark that the worker has read from this service, in"
    " this generation of the job.",
    errors.StaleEpochError: "Go on with a later epoch: this one is already committed, or can no longer"
    " be.",
    errors.EpochsWaitingError: "Commit the epochs that wait, and then report again.",
    errors.UnavailableError: "Retry after `Retry-After`. Promises and watermarks are not lost"
    " meanwhile.",
    errors.GuardError: "Change the request as the detail describes.",
    errors.MalformedHttpError: "Use HTTP/1.1. A client of TLS may have reached a port without TLS.",
    errors.CrossSiteError: "Send the request from a page of this service, or from a client that is not a"
    " browser.",
    errors.RequestTimeoutError: "Send the whole request at once. A slow network may need smaller"
    " bodies.",
    errors.UriTooLongError: "Shorten the address or its query.",
    errors.UnsupportedMediaTypeError: "Send `Content-Type: application/json`, or leave the header out.",
    errors.UnknownHostError: "List the name of the service in `TIDEGAUGE_ALLOWED_HOSTS`, or use its"
    " address.",
    errors.HeaderTooLargeError: "Send fewer or shorter headers.",
    errors.OverloadedError: "Retry after `Retry-After`, with fewer or smaller requests at once.",
}
"""Text for the reader of a problem: the next thing to do."""

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
}


def problem_types() -> Sequence[type[ProblemError]]:
    """Return the errors that a response may have, by status and slug."""
    # Subclasses in other modules have the slugs of these.
    found = {each for each in vars(errors).values() if isinstance(each, type)}
    known = {each for each in found if issubclass(each, ProblemError)} - _AT_THE_START
    return sorted(known, key=lambda each: (each.status, each.slug))


def remedy(error: type[ProblemError]) -> str:
    """Return the next thing to do. A test requires one for each error; a service starts without it."""
    return REMEDIES.get(error, "")


def mount(app: FastAPI) -> None:
    """Serve the pages, and the list of them."""
    pages = {f"/problems/{each.slug}": _page(each) for each in problem_types()}
    for path, page in {**pages, "/problems": _list()}.items():
        served = StaticFile("text/html", page.encode, _HEADERS)
        app.add_route(path, served.__call__, include_in_schema=False)


def _page(error: type[ProblemError]) -> str:
    return _html(
        error.slug,
        f"<p>{error.status}. {_marked(error.title())}</p>\n"
        f"<p>{_marked(remedy(error))}</p>\n"
        # Relative: a proxy may serve the service below a path of its own.
        '<p><a href="../problems">All problems</a>, <a href="../docs">the HTTP API</a></p>',
    )


def _list() -> str:
    lines = [
        f'<li><a href="problems/{each.slug}">{each.slug}</a>'
        f" ({each.status}): {_marked(each.title())}</li>"
        for each in problem_types()
    ]
    return _html("Problems", "\n".join(["<ul>", *lines, "</ul>"]))


def _marked(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _html(title: str, content: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title} - tidegauge</title>\n<h1>{title}</h1>\n{content}\n</html>\n"
    )
