"""The contract of messages: ids, names of destinations, and a pending message.

An id is `<due as 12 hex digits>-<unique part>`. The unique part is the sender's `due-id`, or says
where the record was taken in. An id is deterministic, so reading a record twice gives the same one;
it sorts by time; and it names the slot to search, so that cancelling needs no index.
"""

import base64
import binascii
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Self

from duetime.core import headers as H
from duetime.core.errors import InvalidMessage, Reason

#: The end of the text for Python and Java alike: `$` would let a line feed pass behind it.
END = r"(?![\s\S])"

#: The topic names that Kafka allows (besides `.` and `..`).
TOPIC_PATTERN = rf"^[a-zA-Z0-9._-]{{1,249}}{END}"

#: The ends of two topic names that each namespace has; the level follows the second.
LEADER, WHEEL = ".leader", ".wheel."

#: The default end of the name of a queue's markers topic.
MARKERS = "__markers"

#: A topic of a namespace, except its intake: other services may have topics with such names.
NAMESPACE_TOPIC = (
    r"^[a-zA-Z0-9_-]{1,40}\.(control|rejected|retry|isolated|sending|dead-letter|redrive-log|"
    r"lanes|store-inbox|schedule-commands|schedules|warmup|tracker-wakeup|leader|wheel\.[0-9]+|"
    rf"(outbox|isolated)\.[a-zA-Z0-9_-]+){END}"
)

#: A cluster's name: it becomes part of a topic's name.
CLUSTER_PATTERN = rf"^[a-zA-Z0-9_-]{{1,40}}{END}"

#: A sender's id: safe in a URL, in a shell and in a log. `@` marks the ids that intake makes.
UNIQUE_PATTERN = rf"^[A-Za-z0-9._:=~+-][A-Za-z0-9._:=~+@-]{{0,199}}{END}"

#: A schedule's name: shorter, because its runs' ids and more are made of it.
SCHEDULE_PATTERN = rf"^[A-Za-z0-9._:=~+@-]{{1,160}}{END}"

#: The beginning of the unique part of the id under which a schedule waits for its next run.
SCHEDULE_MARK = "@schedule:"

#: Any full id.
ID_PATTERN = rf"^[0-9a-f]{{12}}-[A-Za-z0-9._:=~+@-]{{1,200}}{END}"

#: The latest instant an id can carry: 12 hex digits of ms, in the year 10889.
LATEST_MS = 2**48 - 1

#: Margin added to short_delay_threshold_ms for a replacement, in ms. The cancel of the replaced
#: message needs up to this long to reach its slot.
REPLACING_MS = 3_000

#: Separates id and instant in the sort key of a retry. It needs a key of its own while the first
#: record is not settled.
RETRY_MARK = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageId:
    """A message's id: its due time and its unique part."""

    due_ms: int
    unique: str

    def __post_init__(self) -> None:
        if not 0 <= self.due_ms <= LATEST_MS:
            raise InvalidMessage(
                Reason.BAD_DUE_TIME,
                f"{self.due_ms} is not an instant in epoch ms from 0 to {LATEST_MS}",
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an id as `duetime send` prints it. Raises InvalidMessage (bad-id)."""
        if not re.match(ID_PATTERN, text):
            raise InvalidMessage(
                Reason.BAD_ID, f"{text!r} is no message id: it is 12 hex digits, a dash and a name"
            )
        return cls(due_ms=int(text[:12], 16), unique=text[13:])

    def __str__(self) -> str:
        return f"{self.due_ms:012x}-{self.unique}"


class SortKey(NamedTuple):
    """The sort key of a pending message."""

    due_ms: int
    #: Its id; of a retry, which is due at another time than the id says, with its instant.
    name: str

    @classmethod
    def of(cls, id: str, due_ms: int) -> Self:  # noqa: A002 (the public name of an id)
        """Return the sort key of the message with this id that is due at `due_ms`."""
        is_first = id[:12] == f"{due_ms:012x}"
        return cls(due_ms, id if is_first else f"{id}{RETRY_MARK}{due_ms}")

    @classmethod
    def parse(cls, name: str) -> Self:
        """Parse a sort key's name. Raises InvalidMessage (bad-id, bad-due-time)."""
        first, is_retry, retry_ms = name.partition(RETRY_MARK)
        identity = MessageId.parse(first)
        if not is_retry:
            return cls(identity.due_ms, first)
        # Python reads no number of thousands of digits; LATEST_MS has 15.
        is_number = retry_ms.isascii() and retry_ms.isdecimal() and len(retry_ms) < 20
        if not is_number or int(retry_ms) > LATEST_MS:
            raise InvalidMessage(Reason.BAD_DUE_TIME, f"{name!r} has no instant behind its /")
        return cls.of(first, int(retry_ms))


class Retry(NamedTuple):
    """The next retry of a message whose delivery has failed."""

    #: When it is, epoch ms.
    at_ms: int
    #: The attempts so far.
    attempts: int
    #: When the delivery failed first, epoch ms.
    failed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMessage:
    """A pending message, as `find` and `messages` return it."""

    id: MessageId
    topic: str
    partition: int | None
    #: The cluster that it is for; None is this one.
    cluster: str | None
    #: The instant after which it is not delivered any more, epoch ms; None is never.
    expires_ms: int | None
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: Sequence[H.Header] = field(repr=False)
    cancelled: bool
    #: None before its first attempt.
    retry: Retry | None = None

    @property
    def due_ms(self) -> int:
        """When it is delivered, epoch ms: its due time, or its next attempt."""
        return self.retry.at_ms if self.retry else self.id.due_ms

    @property
    def sort_key(self) -> SortKey:
        """The key by which it is listed."""
        return SortKey.of(str(self.id), self.due_ms)


def check_unique(unique: str) -> str:
    """Return a sender's id if it is valid. Raises InvalidMessage (bad-id)."""
    if not re.match(UNIQUE_PATTERN, unique):
        raise InvalidMessage(
            Reason.BAD_ID,
            f"{unique!r} cannot be an id: use 1 to 200 letters, digits and . _ : = ~ + - "
            "(and @, but not first)",
        )
    return unique


def check_cluster(name: object) -> str:
    """Return a cluster's name if it is valid. Raises InvalidMessage (unknown-cluster)."""
    if not (isinstance(name, str) and re.match(CLUSTER_PATTERN, name)):
        raise InvalidMessage(
            Reason.UNKNOWN_CLUSTER,
            f"{name!r} is no cluster's name: use 1 to 40 of a-z A-Z 0-9 _ -",
        )
    return name


@lru_cache
def check_destination(topic: str, namespace: str, reserved: tuple[str, ...] = ()) -> str:
    """Return the topic if it can be a destination. Topics of other namespaces are not recognised.

    Raises InvalidMessage (bad-topic, internal-topic).
    """
    if not re.match(TOPIC_PATTERN, topic) or topic in (".", ".."):
        raise InvalidMessage(
            Reason.BAD_TOPIC, f"{topic!r} is no topic name: use 1 to 249 of a-z A-Z 0-9 . _ -"
        )
    if is_internal(topic, namespace, reserved):
        raise InvalidMessage(
            Reason.INTERNAL_TOPIC,
            f"{topic} belongs to Kafka or duetime: choose another destination",
        )
    return topic


def is_internal(
    topic: str,
    namespace: str,
    reserved: Container[str] = (),
    exists: Callable[[str], bool] = lambda _: False,
) -> bool:
    """Return whether the topic belongs to Kafka or duetime, and so is no destination.

    `reserved` are those of `core.topics.reserved_topics`. `exists` tells whether a topic exists.
    Another namespace is recognised by two topics that each has: `payments.retry` is internal only
    where `payments.leader` and `payments.wheel.0` exist.
    `duetime.pipeline.intake.canonical_request` has the same rule as a column.
    """
    other = topic.partition(".")[0]
    return (
        topic.startswith(("__", f"{namespace}."))
        or topic.endswith(MARKERS)
        or topic in reserved
        or (
            re.match(NAMESPACE_TOPIC, topic) is not None
            and exists(f"{other}{LEADER}")
            and exists(f"{other}{WHEEL}0")
        )
    )


def payload_json(name: str, data: bytes | None) -> dict[str, str | None]:
    """Return bytes as a JSON field: text if they are UTF-8, else base64 in `<name>_base64`."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data or b"").decode()}


def from_base64(text: str, what: str) -> bytes:
    """Decode base64; `what` names the text in the error. Raises InvalidMessage (malformed)."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidMessage(
            Reason.MALFORMED, f"{what} is no base64: use the standard alphabet, and padding"
        ) from None
