"""What a dead letter or a rejected record says to whoever asked to be told of it."""

import json
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Message

from duetime.config import Settings
from duetime.message import (
    DUE_AT_MS,
    DUE_ATTEMPTS,
    DUE_CALLBACK,
    DUE_CLUSTER,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_ERROR_SOURCE,
    DUE_FAILED_FIRST_MS,
    DUE_FAILED_LAST_MS,
    DUE_ID,
    DUE_PARTITION,
    DUE_TOPIC,
    headers_without,
)
from duetime.payload import payload_json
from duetime.stores.records import headers_of

#: The longest number that a header may have, in digits.
DIGITS = 18

#: What a callback says about a message, by the header that has it.
WORDS = {
    DUE_ID: "id",
    DUE_TOPIC: "topic",
    DUE_PARTITION: "partition",
    DUE_CLUSTER: "cluster",
    DUE_AT_MS: "due_at_ms",
    DUE_ERROR: "reason",
    DUE_ERROR_DETAIL: "detail",
    DUE_ERROR_SOURCE: "source",
    DUE_ATTEMPTS: "attempts",
    DUE_FAILED_FIRST_MS: "failed_first_ms",
    DUE_FAILED_LAST_MS: "failed_last_ms",
}

#: Those of them that are numbers.
NUMBERS = ("partition", "due_at_ms", "attempts", "failed_first_ms", "failed_last_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """What is told to whom."""

    url: str
    body: dict[str, Any]


def callback_of(record: Message, settings: Settings) -> Callback | None:
    """The callback that a dead letter or a rejected record asks for."""
    headers = headers_of(record)
    by_name = {name: value for name, value in headers if value is not None}
    url = by_name.get(DUE_CALLBACK) or _airtel_url(record, by_name, settings)
    if not url:
        return None
    told = {
        word: by_name[name].decode(errors="replace")
        for name, word in WORDS.items()
        if name in by_name
    }
    own = headers_without(headers, (*WORDS, DUE_CALLBACK))
    body: dict[str, Any] = {
        name: _number(text) if name in NUMBERS else text for name, text in told.items()
    }
    body |= payload_json("key", record.key()) | payload_json("value", record.value())
    body["headers"] = [{"name": name, **payload_json("value", value)} for name, value in own]
    return Callback(url=url.decode(errors="replace"), body=body)


def _airtel_url(record: Message, by_name: dict[str, bytes], settings: Settings) -> bytes | None:
    """The URL that a rejected JSON envelope names, if it can be read that far."""
    source = by_name.get(DUE_ERROR_SOURCE, b"").decode(errors="replace")
    if not source.startswith(f"{settings.airtel_topic}/"):
        return None
    try:
        envelope = json.loads(record.value() or b"")
        url = envelope["failurePostCallbackUrl"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return url.encode(errors="replace") if isinstance(url, str) else None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= DIGITS else None
