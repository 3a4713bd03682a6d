"""For those who run the service."""

from __future__ import annotations

from fastapi import Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from service.api import routing
from service.api.bodies import HealthBody
from service.api.exchange import aggregator, answer, describe, state
from service.errors import UnavailableError

router = routing.router("operations")


@router.get("/healthz", **describe(gives=HealthBody))
async def healthz(_request: Request) -> Response:
    """Tell that the process is alive."""
    return answer(HealthBody())


@router.get("/readyz", **describe(gives=HealthBody, errors=(UnavailableError,)))
async def readyz(request: Request) -> Response:
    """Tell whether the stores answer."""
    await aggregator(request).ready()
    return answer(HealthBody())


@router.get(
    "/metrics",
    status_code=200,
    responses={200: {"description": "Metrics for Prometheus", "content": {"text/plain": {}}}},
)
async def metrics(request: Request) -> Response:
    """Show the metrics."""
    use = aggregator(request)
    try:
        jobs = await use.shown()
    except UnavailableError:
        # Both stores are away. What this process has counted is worth knowing then above all.
        jobs = ()
    text = state(request).metrics.render(jobs, use.now_ms())
    return Response(text, media_type=CONTENT_TYPE_LATEST)
