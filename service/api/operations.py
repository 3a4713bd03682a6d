"""Health and metrics, for the operators of the service."""

from __future__ import annotations

from fastapi import Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from service.api.endpoints import Call, Endpoints
from service.api.responses.common import HealthBody
from service.errors import UnavailableError
from service.model.keys import Role

endpoints = Endpoints("operations")


@endpoints.get("/healthz", role=None, gives=HealthBody)
async def healthz(_call: Call[None]) -> HealthBody:
    """Show that the process is alive."""
    return HealthBody()


@endpoints.get("/readyz", role=None, gives=HealthBody, errors=(UnavailableError,))
async def readyz(call: Call[None]) -> HealthBody:
    """Check that the stores take writes."""
    await call.aggregator.ready()
    return HealthBody()


@endpoints.get(
    "/metrics", role=Role.SCRAPE, about="Metrics for Prometheus", media_type="text/plain"
)
async def get_metrics(call: Call[None]) -> Response:
    """Show the metrics."""
    try:
        survey = await call.aggregator.survey()
    except UnavailableError:
        # Neither store answers. The counters of this process matter most in this case.
        survey = None
    text = await call.metrics.render(survey, call.aggregator.now_ms())
    return Response(text, media_type=CONTENT_TYPE_LATEST)
