"""The answers of a service with one job, for the commands that show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEW_YEAR = 1_767_225_600_000
MINUTE = 60_000
MAX = 9_223_372_036_854_775_807
AT = "2026-01-01T03:04:05.678Z"
EARLIER = "2026-01-01T03:01:00.000Z"

SOURCE, KEYED, LAST = "mobile-checkout-events-eu", "sessions-by-customer", "z"
BECAUSE = f"2 of 24 ranges of {SOURCE} have no worker since {EARLIER} (their last run was stopped)"


def stage(name: str, output: int | None, **members: Any) -> dict[str, Any]:
    return {
        "job": "scores",
        "stage": name,
        "generation": 3,
        "version": 7,
        "status": "active",
        "health": "ok",
        "input_watermark": None,
        "output_watermark": output,
        "ranges": {
            "total": 24,
            "reported": 24,
            "idle": 0,
            "final": 24 if output == MAX else 0,
            "leased": 22,
        },
        "updated_at": AT,
        "data_lag_ms": 59 * MINUTE + 59_000,
        "system_lag_ms": 2_340,
        "records": 1_234_567,
        "late": 17,
        "corrections": 0,
        **members,
    }


STAGES = {
    SOURCE: stage(SOURCE, NEW_YEAR + 123, health="no_worker"),
    "console": stage("console", MAX, status="final", health="final", data_lag_ms=None, late=None),
    KEYED: stage(KEYED, NEW_YEAR - MINUTE, input_watermark=NEW_YEAR + 123, health="waiting"),
    # Last in the order of the graph, and neither in that of names nor in that of lags.
    LAST: stage(LAST, None, input_watermark=NEW_YEAR - MINUTE, status="unknown", health="waiting"),
}


def range_(name: str, promise: int | None, **members: Any) -> dict[str, Any]:
    return {
        "range": name,
        "start": None,
        "end": None,
        "status": "active",
        "promise": promise,
        "holds": {},
        "holder": "checkout-driver-7f6bd9c4-executor-12",
        "fence": 42,
        "expires_in_ms": 9_120,
        "reported_at": AT,
        **members,
    }


SHARDS = [
    range_("mobile-checkout-events-eu-0007", None, holder=None, expires_in_ms=None,
           status="unknown", reported_at=None),
    range_("mobile-checkout-events-eu-0011", NEW_YEAR + 123, holder=None, expires_in_ms=None),
    range_("mobile-checkout-events-eu-0012", NEW_YEAR + MINUTE,
           holds={"state": NEW_YEAR + MINUTE, "output": NEW_YEAR + 2 * MINUTE}),
    range_("mobile-checkout-events-eu-0020", NEW_YEAR + 2 * MINUTE, holder=None, status="final",
           expires_in_ms=None, retired=True),
]  # fmt: skip

PROBLEM = {
    "job": "scores",
    "stage": SOURCE,
    "health": "no_worker",
    "severity": "critical",
    "since": EARLIER,
    "ranges": 2,
    "examples": ["mobile-checkout-events-eu-0007", "mobile-checkout-events-eu-0011"],
    "holds_back": [KEYED, LAST],
    "because": BECAUSE,
}
QUIET = "a-job-with-a-name-that-is-much-longer-than-others-7"

_EXPLANATION = {
    "job": "scores",
    "stage": LAST,
    "output_watermark": None,
    "status": "unknown",
    "health": "waiting",
    "since": AT,
    "because": f"{LAST} waits for {SOURCE}: {BECAUSE}",
    "path": [{"stage": LAST, "reason": "input"}, {"stage": SOURCE, "reason": "ranges"}],
    "holders": [
        {
            **{k: SHARDS[1][k] for k in ("range", "promise", "holder", "fence", "expires_in_ms")},
            "stage": SOURCE,
            "reported_at": AT,
            "would_be": NEW_YEAR + MINUTE,
            "since": EARLIER,
            "reason": "lease_expired",
            "component": None,
        }
    ],
    "holders_total": 2,
}
_ADVICE = {
    "pause": True,
    "until": NEW_YEAR + MINUTE,
    "rate": 0.25,
    "because": f"it is 3600000 ms ahead of {KEYED}, which is the slowest stage of its group",
}
_SLOWER = {
    "pause": False,
    "until": None,
    "rate": 0.3,
    "because": f"{KEYED} is more than 10 min behind {SOURCE}",
}
_SPEC = {
    SOURCE: {"shards": [each["range"] for each in SHARDS], "watermark": "at - INTERVAL 10 MINUTES"},
    "console": {"shards": ["console-0"]},
    KEYED: {"inputs": [SOURCE], "ranges": 2},
    LAST: {"inputs": [KEYED, "console"], "passthrough": True},
}
_THROTTLE = {"groups": [{"stages": [SOURCE, "console"], "max_drift_ms": MINUTE}]}
JOB = {
    "job": "scores",
    "generation": 3,
    "layout_version": 2,
    "health": {name: each["health"] for name, each in STAGES.items()},
    "stages": _SPEC,
    "throttle": _THROTTLE,
}
KEYS = {
    "keys": [
        {
            "name": "workers-of-the-checkout-team",
            "role": "report",
            "jobs": "scores-*",
            "created_at": EARLIER,
            "created_by": "admin (environment)",
            "expires_at": "2026-04-01T00:00:00.000Z",
            "used_at": AT,
        },
        {
            "name": "ci",
            "role": "admin",
            "jobs": "*",
            "created_at": EARLIER,
            "created_by": "admin (environment)",
            "expires_at": None,
            "used_at": None,
        },
    ]
}
AUDIT = {
    "records": [
        {
            "number": 2,
            "at": AT,
            "by": "workers-of-the-checkout-team",
            "address": "203.0.113.255",
            "action": "open-run",
            "job": "scores",
            "key": None,
            "detail": f"run 7 of {SOURCE}, console by checkout-driver-7f6bd9c4",
        },
        {
            "number": 1,
            "at": EARLIER,
            "by": "admin (environment)",
            "address": "127.0.0.1",
            "action": "create-key",
            "job": None,
            "key": "ci",
            "detail": "admin for *",
        },
    ]
}
RUNS = {
    "runs": [
        {
            "run": 12,
            "stages": [SOURCE, "console"],
            "holder": "checkout-driver-7f6bd9c4",
            "program": "checkout sessions",
            "links": {"spark": "http://checkout-driver-7f6bd9c4.checkout.svc:4040"},
            "started_at": AT,
            "ended_at": None,
            "outcome": None,
            "because": None,
            "epoch": 1_204,
        },
        {
            "run": 11,
            "stages": [SOURCE],
            "holder": "checkout-driver-5c9d7b11",
            "program": None,
            "links": {},
            "started_at": EARLIER,
            "ended_at": None,
            "outcome": None,
            "because": None,
            "epoch": None,
        },
        {
            "run": 10,
            "stages": [SOURCE],
            "holder": "checkout-driver-5c9d7b11",
            "program": None,
            "links": {},
            "started_at": EARLIER,
            "ended_at": AT,
            "outcome": "failed",
            "because": "the executors have run out of memory",
            "epoch": 7,
        },
    ]
}
HISTORY = {
    "points": [
        {"at": NEW_YEAR, "input_watermark": None, "output_watermark": None, "status": "unknown"},
        {
            "at": NEW_YEAR + 4_005,
            "input_watermark": NEW_YEAR - 250,
            "output_watermark": NEW_YEAR - MINUTE,
            "status": "active",
        },
        {
            "at": NEW_YEAR + 9_005,
            "input_watermark": NEW_YEAR - 250,
            "output_watermark": NEW_YEAR - 250,
            "status": "active",
        },
    ]
}
ETA = {
    "at": NEW_YEAR,
    "reached": False,
    "expected_at": AT,
    "between": [EARLIER, AT],
    "confidence": 0.8,
    "because": "it has moved 1 s in a second for an hour",
}

_OF_STAGE = {"input_watermark": None, "status": "active"}
RETIREMENT = {
    "job": "scores",
    "stage": SOURCE,
    "range": SHARDS[1]["range"],
    "retired": False,
    "promise": NEW_YEAR + 123,
    "holder": None,
    "moves": [
        {
            "stage": SOURCE,
            "before": {**_OF_STAGE, "output_watermark": NEW_YEAR + 123},
            "after": {**_OF_STAGE, "output_watermark": NEW_YEAR + MINUTE},
        }
    ],
}


def _summary(job: str, slowest: Mapping[str, Any], **members: Any) -> Mapping[str, Any]:
    named = ("status", "output_watermark", "data_lag_ms")
    of_job = {
        "job": job,
        "stages": len(_SPEC) if job == "scores" else 1,
        "slowest": slowest["stage"],
    }
    sound = {"since": AT, "health": "ok", "problems": 0, "because": None}
    return of_job | {name: slowest[name] for name in named} | sound | members


BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/jobs": {
        "jobs": [
            {"job": name, "generation": 3, "layout_version": 2, "stages": list(stages)}
            for name, stages in (("scores", _SPEC), (QUIET, {"console": {}}))
        ]
    },
    "/v1/overview": {
        "jobs": [
            _summary(
                "scores",
                STAGES[LAST],
                health="no_worker",
                problems=1,
                late_ranges=2,
                because=PROBLEM["because"],
            ),
            _summary(QUIET, stage("console", NEW_YEAR), slowest_ended=True),
        ],
        "matching": 2,
        "total": 2,
    },
    "/v1/jobs/scores": JOB,
    "/v1/jobs/scores/watermarks": {"job": "scores", "generation": 3, "watermarks": STAGES},
    f"/v1/jobs/{QUIET}/watermarks": {
        "job": QUIET,
        "generation": 3,
        "watermarks": {"console": stage("console", NEW_YEAR)},
    },
    "/v1/jobs/scores/problems": {
        "job": "scores",
        "health": "no_worker",
        "problems": [PROBLEM],
        "late_ranges": 2,
    },
    "/v1/problems": {"problems": [PROBLEM], "total": 1, "late_ranges": {"scores": 2}},
    f"/v1/jobs/scores/stages/{SOURCE}/watermark": STAGES[SOURCE],
    f"/v1/jobs/scores/stages/{SOURCE}/ranges": {
        "job": "scores",
        "stage": SOURCE,
        "total": 24,
        "ranges": SHARDS,
    },
    f"/v1/jobs/scores/stages/{SOURCE}/ranges/{SHARDS[1]['range']}/retire": RETIREMENT,
    f"/v1/jobs/scores/stages/{SOURCE}/history": HISTORY,
    "/v1/jobs/scores/runs": RUNS,
    **{
        f"/v1/jobs/scores/stages/{each}/commits": {
            "job": "scores",
            "stage": each,
            "generation": 3,
            "run": 12,
            "epoch": 1_204,
        }
        for each in (SOURCE, "console")
    },
    f"/v1/jobs/scores/stages/{LAST}/eta": ETA,
    f"/v1/jobs/scores/stages/{LAST}/explain": _EXPLANATION,
    "/v1/jobs/scores/throttle": {
        "version": 1,
        "groups": [
            {
                "stages": [SOURCE, "console"],
                "limit": NEW_YEAR + MINUTE,
                "held_by": {"stage": "console", "range": "console-0"},
            }
        ],
        "shards": {SOURCE: {SHARDS[1]["range"]: _SLOWER, SHARDS[2]["range"]: _ADVICE}},
    },
    "/v1/keys": KEYS,
    "/v1/audit": AUDIT,
}
