"""The records that a client sends: made from what it wants, and checked before they leave.

Whatever intake would reject is refused here already, with the same reason, so that the one who
asked hears of it. Nothing here sends, and nothing reads a clock.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from secrets import token_hex

from duetime.clock import duration_ms, instant_ms
from duetime.config import Settings
from duetime.errors import InvalidMessage, Reason
from duetime.message import (
    CANCEL,
    DUE_AT_MS,
    DUE_CLUSTER,
    DUE_EXPIRES_MS,
    DUE_ID,
    DUE_OP,
    DUE_PARTITION,
    DUE_REPLACES,
    DUE_TOPIC,
    HEADER_FRAME_BYTES,
    SERIES_MARK,
    TAKEN,
    MessageId,
    check_cluster,
    check_destination,
    check_unique,
)
from duetime.topics import TopicNames, markers, native_topic

#: What a sender may give as a key, a value or a header's value; text is sent as UTF-8.
Payload = str | bytes | None

Headers = Mapping[str, Payload] | Iterable[tuple[str, Payload]]

#: A header as Kafka has it.
Header = tuple[str, bytes | None]

#: librdkafka's word for "you choose the partition", which it does by the key.
ANY_PARTITION = -1

#: The headers that are made from arguments: all of an address, but a sender says when it expires.
OWN_HEADERS = tuple(name for name in TAKEN if name != DUE_EXPIRES_MS)

#: Random bytes in the unique part of an id.
UNIQUE_BYTES = 16

#: The highest partition that intake takes: six digits.
LAST_PARTITION = 999_999


# Neither is frozen: a batch makes hundreds of each, and a frozen one takes twice as long to make.
@dataclass(slots=True, kw_only=True)
class Outgoing:
    """A record for one of duetime's intake topics."""

    #: The message that it schedules, or speaks of; of a series, its first run.
    id: MessageId
    topic: str
    #: None is by the key.
    partition: int | None = None
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: tuple[Header, ...] = field(repr=False)
    #: The name of the series that it asks for; None of a message that comes once.
    series: str | None = None

    @property
    def name(self) -> str:
        """What whoever asked for it is to call it."""
        return self.series or str(self.id)


@dataclass(slots=True, kw_only=True)
class Wanted:
    """A message as its sender wants it delivered."""

    topic: str
    value: Payload = field(default=None, repr=False)
    key: Payload = field(default=None, repr=False)
    headers: Headers | None = field(default=None, repr=False)
    partition: int | None = None
    #: The name of another cluster; None is the one where duetime runs.
    cluster: str | None = None


def scheduled(  # noqa: PLR0913 (all that a record says)
    wanted: Wanted,
    settings: Settings,
    *,
    due_ms: int,
    now_ms: int,
    unique: str,
    replaces: MessageId | None = None,
) -> Outgoing:
    """The record that schedules the message. `due_ms` may be in the past: it is due at once then.

    The message that it `replaces` is cancelled with that, by the same record. Raises InvalidMessage
    with the reason that intake would reject the record for.
    """
    settings.wheel.check_reach(due_ms, now_ms)
    own = _text(unique, "the id", Reason.BAD_ID, "text")
    identity = MessageId(due_ms=due_ms, unique=check_unique(own))
    key, value = encoded(wanted.key, "the key"), encoded(wanted.value, "the value")
    headers = encoded_headers(wanted.headers)
    _check_expiry(headers)
    check_size(key, value, headers, settings.largest_bytes)
    address = _address(wanted, settings, identity)
    if replaces is not None:
        address.append((DUE_REPLACES, str(replaces).encode()))
    return Outgoing(
        id=identity,
        topic=native_topic(settings.namespace),
        key=key,
        value=value,
        headers=(*address, *headers),
    )


def cancelled(identity: MessageId, settings: Settings, retry_ms: int | None = None) -> Outgoing:
    """The control record that cancels the message, or its retry at that instant.

    Raises InvalidMessage (bad-id) for a series that waits: without it there would be no next run.
    """
    if identity.unique.startswith(SERIES_MARK):
        raise InvalidMessage(
            Reason.BAD_ID,
            f"{identity} is a series that waits for its next run: pause or stop it by its name",
        )
    at = () if retry_ms is None else ((DUE_AT_MS, str(retry_ms).encode()),)
    return Outgoing(
        id=identity,
        topic=TopicNames(settings).control,
        key=str(identity).encode(),
        value=None,
        headers=((DUE_OP, CANCEL.encode()), *at),
    )


def due_time_ms(
    at: datetime | None,
    in_: timedelta | None,
    now_ms: int,
    deliver_after: datetime | None = None,
) -> int:
    """The instant, in epoch ms, that a sender gives in one of these ways; those with a zone.

    Raises InvalidMessage (no-due-time, two-due-times, bad-due-time).
    """
    if len([each for each in (at, in_, deliver_after) if each is not None]) > 1:
        raise InvalidMessage(
            Reason.TWO_DUE_TIMES, "more than one of at, in_ and deliver_after is given: leave one"
        )
    if at is not None:
        return _instant_ms(at)
    if deliver_after is not None:
        return _instant_ms(deliver_after)
    if in_ is not None:
        return now_ms + _delay_ms(in_)
    raise InvalidMessage(Reason.NO_DUE_TIME, "neither at nor in_ is given: add one")


def new_unique() -> str:
    """The unique part of an id for a sender that has none of its own."""
    return new_uniques(1)[0]


def new_uniques(count: int) -> list[str]:
    """The same for several: to ask the system for so much at once is as quick as for one."""
    drawn = token_hex(UNIQUE_BYTES * count)
    digits = 2 * UNIQUE_BYTES
    return [drawn[start : start + digits] for start in range(0, len(drawn), digits)]


def encoded(payload: object, what: str, reason: Reason = Reason.UNREADABLE) -> bytes | None:
    """The bytes to send; `what` names the payload where it cannot be sent.

    Raises InvalidMessage: only text and bytes are sent, nothing is serialised here.
    """
    if payload is None or isinstance(payload, bytes):
        return payload
    return _text(payload, what, reason, "bytes, text or None").encode()


def encoded_headers(headers: Headers | None, taken: Sequence[str] = OWN_HEADERS) -> list[Header]:
    """The sender's own headers, in order; none that is `taken`.

    Raises InvalidMessage (bad-headers).
    """
    return [
        (_header_name(name, taken), encoded(value, f"header {name}", Reason.BAD_HEADERS))
        for name, value in _pairs(headers)
    ]


def _address(wanted: Wanted, settings: Settings, identity: MessageId) -> list[tuple[str, bytes]]:
    topic = _text(wanted.topic, "the topic", Reason.BAD_TOPIC, "its name")
    headers = [
        (DUE_TOPIC, check_destination(topic, settings.namespace, markers(settings)).encode()),
        (DUE_AT_MS, b"%d" % identity.due_ms),
        (DUE_ID, identity.unique.encode()),
    ]
    if wanted.partition is not None:
        headers.append((DUE_PARTITION, b"%d" % check_partition(wanted.partition)))
    if wanted.cluster is not None:
        headers.append((DUE_CLUSTER, check_cluster(wanted.cluster).encode()))
    _check_allowed(topic, wanted.cluster, settings)
    return headers


def _check_allowed(topic: str, cluster: str | None, settings: Settings) -> None:
    """Raises InvalidMessage (not-allowed)."""
    intake = native_topic(settings.namespace)
    allowed = settings.allow.get(intake)
    if allowed and not allowed.allows(topic, cluster):
        there = f" on cluster {cluster}" if cluster else ""
        raise InvalidMessage(
            Reason.NOT_ALLOWED,
            f"what comes in by {intake} may not go to {topic}{there}: add it to allow",
        )


def _instant_ms(at: object) -> int:
    if isinstance(at, datetime):
        return instant_ms(at)
    raise InvalidMessage(
        Reason.BAD_DUE_TIME, f"at is of type {type(at).__name__}: give a datetime with a zone"
    )


def _delay_ms(in_: object) -> int:
    if not isinstance(in_, timedelta):
        raise InvalidMessage(
            Reason.BAD_DUE_TIME, f"in_ is of type {type(in_).__name__}: give a timedelta"
        )
    if in_ < timedelta(0):
        raise InvalidMessage(Reason.BAD_DUE_TIME, "in_ is negative: a delay is 0 or more")
    return duration_ms(in_)


def _pairs(headers: object) -> list[tuple[object, object]]:
    if headers is None:
        return []
    if isinstance(headers, Mapping):
        return list(headers.items())
    try:
        return [(name, value) for name, value in headers]  # type: ignore[attr-defined]  # tried
    except (TypeError, ValueError):
        raise InvalidMessage(
            Reason.BAD_HEADERS, "headers are neither a dict nor pairs of a name and a value"
        ) from None


def _header_name(given: object, taken: Sequence[str]) -> str:
    name = _text(given, "a header's name", Reason.BAD_HEADERS, "text")
    if name in taken:
        raise InvalidMessage(
            Reason.BAD_HEADERS, f"header {name} is made from the arguments: leave it out"
        )
    # librdkafka takes a name up to its first NUL.
    if "\0" in name:
        raise InvalidMessage(
            Reason.BAD_HEADERS, f"header name {name!r} would be cut at its NUL: leave that out"
        )
    return name


def check_partition(partition: object) -> int:
    """The partition, if intake takes it. Raises InvalidMessage (bad-partition)."""
    if type(partition) is int and 0 <= partition <= LAST_PARTITION:
        return partition
    raise InvalidMessage(
        Reason.BAD_PARTITION, f"partition {partition!r} is no whole number of 0 to {LAST_PARTITION}"
    )


def _check_expiry(headers: Iterable[Header]) -> None:
    # The last of a name counts, and null is never.
    value = dict(headers).get(DUE_EXPIRES_MS)
    if value is not None and not re.fullmatch(rb"[0-9]{1,18}", value):
        raise InvalidMessage(
            Reason.BAD_EXPIRY, f"header {DUE_EXPIRES_MS} is no whole number: write it in epoch ms"
        )


def check_size(
    key: bytes | None, value: bytes | None, headers: Iterable[Header], most_bytes: int
) -> None:
    """Raises InvalidMessage (too-large)."""
    in_headers = sum(
        len(name.encode()) + len(text or b"") + HEADER_FRAME_BYTES for name, text in headers
    )
    size = len(key or b"") + len(value or b"") + in_headers
    if size > most_bytes:
        raise InvalidMessage(
            Reason.TOO_LARGE,
            f"key, value and headers are {size} bytes together, over max_message_bytes or what "
            f"the store takes ({most_bytes}): send less, or a reference to where the rest is",
        )


def _text(given: object, what: str, reason: Reason, wanted: str) -> str:
    """The text, if it is one and has bytes: a lone surrogate is no character."""
    if not isinstance(given, str):
        raise InvalidMessage(reason, f"{what} is of type {type(given).__name__}: give {wanted}")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(reason, f"{what} has a lone surrogate: send bytes instead") from None
    return given
