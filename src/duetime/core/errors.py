"""Everything that can go wrong, as one tree of exceptions.

    DuetimeError
    ├── SetupError          this machine lacks something (Java, jars, a port, room on the disk)
    ├── ConfigError         a setting, or a topic's setting, would lose messages or cannot work
    ├── KafkaError          the cluster does not answer, or refuses
    │   ├── RecordRefused   the cluster refuses this record, and will at each further try
    │   └── ClientFailed    the Kafka client in this process has failed for good
    ├── StoreError          the store (Redis, Aerospike) does not answer, or refuses
    ├── LeaderPaused        the leader stood still for so long that another leads
    ├── OutcomeKnown        a write has failed, and the outcome of each record is known
    ├── UnknownMessage      no pending message has this id, and no schedule this name
    ├── TooLate             the message is delivered, or about to be
    ├── Refused             the HTTP API refuses, for a reason that only HTTP has
    └── InvalidMessage      this message, id or time cannot be taken; `reason` says why

Every error has a fixed `reason`, the same word in a rejected record's header, on the command line
and in metrics, and a `detail`: one sentence that says what is wrong and what to do next.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

#: The longest summary of an error, in characters: Java's may have pages.
MAX_ERROR_TEXT = 400


class Reason(StrEnum):
    """Why a record was refused or could not be delivered: the value of its `due-error` header."""

    NOT_JSON = "not-json"
    NO_VALUE = "no-value"
    BAD_HEADERS = "bad-headers"
    NO_TOPIC = "no-topic"
    BAD_TOPIC = "bad-topic"
    INTERNAL_TOPIC = "internal-topic"
    NOT_ALLOWED = "not-allowed"
    BAD_PARTITION = "bad-partition"
    UNKNOWN_CLUSTER = "unknown-cluster"
    NO_DUE_TIME = "no-due-time"
    TWO_DUE_TIMES = "two-due-times"
    BAD_DUE_TIME = "bad-due-time"
    DELAY_TOO_LONG = "delay-too-long"
    BAD_ID = "bad-id"
    BAD_OPERATION = "bad-operation"
    TOO_LARGE = "too-large"
    TOO_LATE = "too-late"
    MALFORMED = "malformed"
    BAD_EXPIRY = "bad-expiry"
    BAD_CRON = "bad-cron"
    BAD_ZONE = "bad-zone"

    # Why a delayed topic does not take a record.
    NOT_DELAYED = "not-delayed"
    BEYOND_LIMIT = "beyond-limit"
    COMPACTED = "compacted"
    IN_TRANSACTION = "in-transaction"
    # Why a queue's worker cannot have the visibility timeout it asks for.
    BAD_TIMEOUT = "bad-timeout"

    # Why a message could not be delivered: in duetime.retry and duetime.dead-letter.
    UNKNOWN_TOPIC = "unknown-topic"
    NOT_AUTHORISED = "not-authorised"
    NO_SUCH_PARTITION = "no-such-partition"
    TOO_LARGE_FOR_TOPIC = "too-large-for-topic"
    NO_KEY = "no-key"
    NO_LEADER = "no-leader"
    NOT_ENOUGH_REPLICAS = "not-enough-replicas"
    NOT_ACKNOWLEDGED = "not-acknowledged"
    REFUSED_BY_BROKER = "refused-by-broker"
    EXPIRED = "expired"
    RETRIES_EXHAUSTED = "retries-exhausted"

    # Why a queue's message is not delivered again: in the queue's dead letters.
    TIMED_OUT = "timed-out"
    NACKED = "nacked"
    RECORD_DELETED = "record-deleted"


class DuetimeError(Exception):
    """The root: `str(error)` is a sentence for a person, `error.reason` a word for a program."""

    reason: str = "error"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    def __init_subclass__(cls, reason: str | None = None) -> None:
        cls.reason = reason or cls.reason


class SetupError(DuetimeError, reason="setup"):
    """This machine lacks something that duetime needs."""


class ConfigError(DuetimeError, reason="config"):
    """A setting, or a topic's setting, would lose messages or cannot work."""


class KafkaError(DuetimeError, reason="kafka"):
    """The cluster does not answer, or refuses the request."""


class RecordRefused(KafkaError, reason="refused"):
    """The cluster refuses this record, and will at each further try."""


class ClientFailed(KafkaError):
    """The Kafka client in this process has failed for good: only another one sends anything."""


class StoreError(DuetimeError, reason="store"):
    """The store of pending messages does not answer, or refuses the request."""


class LeaderPaused(DuetimeError, reason="paused"):
    """The leader stood still for so long that another leads."""


class LeaderStuck(DuetimeError, reason="stuck"):
    """The leader does not deliver, and a standby may."""


class OutcomeKnown(DuetimeError, reason="refused"):
    """A write has failed, and for each of its records it is known whether it was written."""


class UnknownMessage(DuetimeError, reason="unknown-message"):
    """No pending message has this id, and no schedule this name."""


class TooLate(DuetimeError, reason=Reason.TOO_LATE):
    """The message is delivered already, or about to be."""


class Refused(DuetimeError):
    """The HTTP API refuses, for a reason that only HTTP has."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class InvalidMessage(DuetimeError, ValueError):
    """This message, id or time cannot be taken."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def error_text(error: BaseException) -> str:
    """Summarize an error in one line, without Java's stack trace."""
    summary = " ".join(str(error).partition("\n\tat ")[0].split())
    return summary[:MAX_ERROR_TEXT] or type(error).__name__


def escaped(text: str, kept: str = "") -> str:
    """Escape the characters of foreign text that are not printable, except those in `kept`.

    A line feed would forge a line of a log, and an escape sequence would steer a terminal.
    """
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


_AN_OBJECT, _AN_INTEGER = "it must be {object}", "it must be a whole number"

#: What is wrong, by pydantic's type of error; the braces are filled from the error's context.
_VALIDATION_TEXTS = {
    "missing": "it is missing: add it",
    "extra_forbidden": "there is none of this name: correct it, or leave it out",
    **dict.fromkeys(("model_attributes_type", "model_type", "dict_type"), _AN_OBJECT),
    "list_type": "it must be a list",
    "string_type": "it must be text",
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), _AN_INTEGER),
    **dict.fromkeys(("float_type", "float_parsing"), "it must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "it must be true or false"),
    "greater_than": "it must be more than {gt:g}",
    "greater_than_equal": "it must be {ge} or more",
    "less_than_equal": "it must be {le} or less",
    "string_too_short": "it must have {min_length} characters or more",
    "string_pattern_mismatch": "it must fit {pattern}",
    "too_short": "it must have {min_length} or more",
    "too_long": "it must have {max_length} or less",
    **dict.fromkeys(("enum", "literal_error"), "it must be {expected}"),
}


def validation_words(found: Mapping[str, Any], named: str = "an object") -> str:
    """Translate one error of a pydantic ValidationError into a sentence, without its input.

    `named` is the word for a set of fields: an object in JSON, a table in TOML.
    """
    kind, context = found["type"], found.get("ctx") or {}
    # pydantic counts a secret's characters as it counts a list's items.
    if kind == "too_short" and context.get("field_type") != "List":
        kind = "string_too_short"
    if kind in _VALIDATION_TEXTS:
        return _VALIDATION_TEXTS[kind].format_map({"object": named, **context})
    return str(found["msg"]).removeprefix("Value error, ")
