"""The examples that the OpenAPI document shows of what is answered (`requests`: what is asked)."""

from typing import Any

from duetime.clock import format_instant
from duetime.message import MessageId

#: 24 December 2026, 18:00 UTC.
DUE_MS = 1_798_135_200_000
DUE = format_instant(DUE_MS)
ID = str(MessageId(due_ms=DUE_MS, unique="order-17"))

#: An hour before.
NOW_MS = DUE_MS - 3_600_000

Example = dict[str, Any]

ACCEPTED: Example = {"id": ID, "due": DUE}
ACCEPTED_MANY: Example = {"messages": [ACCEPTED]}

BODY: Example = {
    "key": "17",
    "key_base64": None,
    "value": '{"order":17}',
    "value_base64": None,
    "headers": [{"name": "source", "value": "shop", "value_base64": None}],
}

SUMMARY: Example = {
    "id": ID,
    "topic": "orders",
    "due": DUE,
    "due_at_ms": DUE_MS,
    "expires_ms": None,
    "partition": None,
    "cluster": None,
    "value_bytes": 12,
    "cancelled": False,
    "attempts": 0,
    "failed_ms": None,
}
WAITING = SUMMARY | BODY
PAGE: Example = {"messages": [SUMMARY], "cursor": ID}

COUNTS: Example = {
    "pending": 17,
    "slots": [{"from_ms": DUE_MS, "to_ms": DUE_MS + 1_000, "count": 17}],
}

SERIES: Example = {
    "name": "daily-report",
    "topic": "reports",
    "cron": "0 9 * * 1-5",
    "zone": "Europe/Berlin",
    "until": "2027-12-31T23:00:00.000Z",
    "until_ms": 1_830_294_000_000,
    "misfire": "once",
    "partition": None,
    "cluster": None,
    "paused": False,
    "next": "2026-12-25T08:00:00.000Z",
    "next_ms": 1_798_185_600_000,
}
SERIES_PAGE: Example = {"series": [SERIES]}

DEAD_SUMMARY: Example = {
    "number": 3,
    "id": ID,
    "topic": "orders",
    "partition": 7,
    "cluster": None,
    "due_ms": DUE_MS,
    "reason": "no-such-partition",
    "detail": "the destination has fewer partitions than due-partition asks for",
    "attempts": 10,
    "first_ms": DUE_MS + 2,
    "last_ms": DUE_MS + 411_906,
}
DEAD = DEAD_SUMMARY | BODY
DEAD_PAGE: Example = {"letters": [DEAD_SUMMARY]}
REDRIVEN: Example = {"redriven": 2}

REJECTED_SUMMARY: Example = {
    "number": 5,
    "at_ms": NOW_MS,
    "reason": "bad-topic",
    "detail": "the destination is no topic name: use 1 to 249 of a-z A-Z 0-9 . _ -",
    "source": "duetime.in/0/4711",
}
REJECTED = REJECTED_SUMMARY | BODY
REJECTED_PAGE: Example = {"records": [REJECTED_SUMMARY]}

STATE: Example = {
    "leader": "worker-1:4711",
    "since_ms": NOW_MS - 86_400_000,
    "standbys": ["worker-2:1234"],
    "waiting": 17,
    "late": 0,
    "lag_ms": 0,
    "rescued": 3,
    "rescues": [
        {"at_ms": NOW_MS, "messages": 3, "from_ms": NOW_MS - 21_000, "to_ms": NOW_MS - 11_000}
    ],
    "queries": {"intake": "runs", "lanes": "runs", "failures": "runs"},
}

METRICS = """# HELP duetime_api_spooled_messages Messages in the HTTP API's spool.
# TYPE duetime_api_spooled_messages gauge
duetime_api_spooled_messages 0.0
"""
