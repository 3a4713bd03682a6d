"""Baselines of the figures: handlers that do nothing, on the same server.

`/bare` answers a constant without looking at the request, `/body` reads the request's body first.
"""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI, Request, Response

ANSWER = b'{"ok":true}'
JSON = "application/json"

app = FastAPI()


@app.post("/bare")
async def bare_post() -> Response:
    return Response(ANSWER, media_type=JSON)


@app.get("/bare")
async def bare_get() -> Response:
    return Response(ANSWER, media_type=JSON)


@app.post("/body")
async def body(request: Request) -> Response:
    await request.body()
    return Response(ANSWER, media_type=JSON)


def main(port: int) -> None:
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
