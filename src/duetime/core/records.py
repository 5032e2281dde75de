"""Records that clients send: from a message's specification, validated, to the record.

A record that intake would reject is refused here already, with the same reason, so that its sender
gets the error at once. Nothing here sends, and no clock is read.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from secrets import token_hex
from typing import Any

from duetime.core import headers as H
from duetime.core.clock import duration_ms, format_duration, instant_ms
from duetime.core.cron import Recurrence
from duetime.core.errors import InvalidMessage, Reason
from duetime.core.messages import (
    SCHEDULE_MARK,
    SCHEDULE_PATTERN,
    MessageId,
    check_cluster,
    check_destination,
    check_unique,
)
from duetime.core.settings import Settings
from duetime.core.topics import (
    DELAYED,
    TopicNames,
    enabled_delayed_topics,
    native_topic,
    reserved_topics,
)

#: A key, a value or a header's value as a sender gives it; text is sent as UTF-8.
Payload = str | bytes | None

Headers = Mapping[str, Payload] | Iterable[tuple[str, Payload]]

#: librdkafka's partition number for a choice by the key.
ANY_PARTITION = -1

#: The headers that are made from arguments: the address, except for the expiry.
RESERVED_HEADERS = tuple(name for name in H.CONSUMED if name != H.DUE_EXPIRES_MS)

#: The headers of a delayed topic's records that are made from arguments, or by readers.
DELAYED_HEADERS = (H.DELIVER_AFTER_MS, H.DELIVER_ID, H.DELIVER_GROUP, H.DELIVER_RETRY)

#: Random bytes in the unique part of an id.
UNIQUE_BYTES = 16

#: The highest partition that intake takes: six digits.
LAST_PARTITION = 999_999


# Neither is frozen: a batch makes hundreds of each, and a frozen one takes twice as long to make.
@dataclass(slots=True, kw_only=True)
class MessageSpec:
    """A message as its sender wants it delivered."""

    topic: str
    value: Payload = field(default=None, repr=False)
    key: Payload = field(default=None, repr=False)
    headers: Headers | None = field(default=None, repr=False)
    partition: int | None = None
    #: The name of another cluster; None is the one where duetime runs.
    cluster: str | None = None


@dataclass(slots=True, kw_only=True)
class IntakeRecord:
    """A record for one of duetime's intake topics, or for a delayed topic."""

    #: The message that it schedules, or is about; of a schedule, its first run.
    id: MessageId
    topic: str
    #: None is by the key.
    partition: int | None = None
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: tuple[H.Header, ...] = field(repr=False)
    #: The name of the schedule that it defines; None of a message that comes once.
    schedule: str | None = None

    @property
    def name(self) -> str:
        """The id, or the schedule's name, by which the sender refers to it."""
        return self.schedule or str(self.id)


def intake_record(  # noqa: PLR0913 (a sender's arguments)
    wanted: MessageSpec,
    recurrence: Recurrence | None,
    settings: Settings,
    *,
    at: datetime | None,
    in_: timedelta | None,
    now_ms: int,
    unique: str,
) -> IntakeRecord:
    """Return the record that schedules a message; with a recurrence, one that defines a schedule.

    Raises InvalidMessage with the reason that intake would reject it for.
    """
    if recurrence is None:
        due_ms = due_time_ms(at, in_, now_ms)
        return message_record(wanted, settings, due_ms=due_ms, now_ms=now_ms, unique=unique)
    start_ms = None if at is None and in_ is None else due_time_ms(at, in_, now_ms)
    begin_ms = now_ms if start_ms is None else start_ms
    if (first_ms := recurrence.first(begin_ms)) is None:
        raise InvalidMessage(
            Reason.BAD_CRON, f"{recurrence.cron.expression!r} never comes before its end, or at all"
        )
    record = message_record(wanted, settings, due_ms=begin_ms, now_ms=now_ms, unique=unique)
    if not re.match(SCHEDULE_PATTERN, unique):
        raise InvalidMessage(
            Reason.BAD_ID, "the id of a schedule has at most 160 characters: it is part of others"
        )
    if any(name == H.DUE_EXPIRES_MS for name, _ in record.headers):
        detail = f"a schedule has no {H.DUE_EXPIRES_MS}: until ends it"
        raise InvalidMessage(Reason.BAD_EXPIRY, detail)
    when = tuple((name, text.encode()) for name, text in recurrence.texts().items())
    rest = (each for each in record.headers if start_ms is not None or each[0] != H.DUE_AT_MS)
    first = MessageId(due_ms=first_ms, unique=unique)
    return replace(record, id=first, headers=(*when, *rest), schedule=unique)


def message_record(  # noqa: PLR0913 (the parts of a record)
    wanted: MessageSpec,
    settings: Settings,
    *,
    due_ms: int,
    now_ms: int,
    unique: str,
    replaces: MessageId | None = None,
) -> IntakeRecord:
    """Return the record that schedules the message; one that is due in the past is due at once.

    The same record cancels the message that it `replaces`. Raises InvalidMessage with the reason
    that intake would reject it for.
    """
    settings.wheel.check_reach(due_ms, now_ms)
    identity = _identity(due_ms, unique)
    key, value = encoded(wanted.key, "the key"), encoded(wanted.value, "the value")
    headers = encoded_headers(wanted.headers)
    _check_expiry(headers)
    check_size(key, value, headers, settings.largest_bytes)
    address = _address(wanted, settings, identity)
    if replaces is not None:
        address.append((H.DUE_REPLACES, str(replaces).encode()))
    return IntakeRecord(
        id=identity,
        topic=native_topic(settings.namespace),
        key=key,
        value=value,
        headers=(*address, *headers),
    )


def delayed_record(
    wanted: MessageSpec, settings: Settings, *, deliver_after_ms: int, now_ms: int, unique: str
) -> IntakeRecord:
    """Return the record for the delayed topic; a time in the past is delivered at once.

    Raises InvalidMessage with the reason why the topic cannot take it.
    """
    topic = _delayed_topic(wanted, settings)
    delay_ms, max_ms = deliver_after_ms - now_ms, settings.delayed_topics[topic].max_ms
    if delay_ms > max_ms:
        raise InvalidMessage(
            Reason.BEYOND_LIMIT,
            f"{format_duration(delay_ms)} is over the {format_duration(max_ms)} that topic {topic} "
            "delays: raise delayed.delivery.max.ms, or send with at or in_",
        )
    identity = _identity(deliver_after_ms, unique)
    key, value = encoded(wanted.key, "the key"), encoded(wanted.value, "the value")
    headers = encoded_headers(wanted.headers, DELAYED_HEADERS)
    check_size(key, value, headers, settings.largest_bytes)
    address = (H.DELIVER_AFTER_MS, b"%d" % deliver_after_ms), (H.DELIVER_ID, str(identity).encode())
    return IntakeRecord(
        id=identity,
        topic=topic,
        partition=None if wanted.partition is None else _checked_partition(wanted.partition),
        key=key,
        value=value,
        headers=(*address, *headers),
    )


def cancel_record(
    identity: MessageId, settings: Settings, retry_ms: int | None = None
) -> IntakeRecord:
    """Return the control record that cancels the message, or its retry at that instant.

    Raises InvalidMessage (bad-id) for a schedule that waits: it would never have a next run.
    """
    if identity.unique.startswith(SCHEDULE_MARK):
        raise InvalidMessage(
            Reason.BAD_ID,
            f"{identity} is a schedule that waits for its next run: pause or stop it by its name",
        )
    at = () if retry_ms is None else ((H.DUE_AT_MS, str(retry_ms).encode()),)
    return _control_record(identity, str(identity), ((H.DUE_OP, H.CANCEL.encode()), *at), settings)


def schedule_command_record(name: str, operation: str, settings: Settings) -> IntakeRecord:
    """Return the control record that pauses, resumes or stops the schedule with this name."""
    identity = MessageId(due_ms=0, unique=name)
    return _control_record(identity, name, ((H.DUE_OP, operation.encode()),), settings)


def _control_record(
    identity: MessageId, key: str, headers: tuple[H.Header, ...], settings: Settings
) -> IntakeRecord:
    topic = TopicNames(settings).control
    return IntakeRecord(id=identity, topic=topic, key=key.encode(), value=None, headers=headers)


def due_time_ms(
    at: datetime | None,
    in_: timedelta | None,
    now_ms: int,
    deliver_after: datetime | None = None,
) -> int:
    """Return the due time, epoch ms, from exactly one of a sender's arguments.

    Raises InvalidMessage (no-due-time, two-due-times, bad-due-time).
    """
    if sum(each is not None for each in (at, in_, deliver_after)) > 1:
        raise InvalidMessage(
            Reason.TWO_DUE_TIMES, "more than one of at, in_ and deliver_after is given: leave one"
        )
    if (instant := deliver_after if at is None else at) is not None:
        return instant_ms(_typed(instant, datetime, "at", "a datetime with a zone"))
    if in_ is None:
        raise InvalidMessage(Reason.NO_DUE_TIME, "neither at nor in_ is given: add one")
    if _typed(in_, timedelta, "in_", "a timedelta") < timedelta(0):
        raise InvalidMessage(Reason.BAD_DUE_TIME, "in_ is negative: a delay is 0 or more")
    return now_ms + duration_ms(in_)


def _typed(given: object, kind: type, name: str, wanted: str) -> Any:  # noqa: ANN401 (of the kind)
    if isinstance(given, kind):
        return given
    raise InvalidMessage(
        Reason.BAD_DUE_TIME, f"{name} is of type {type(given).__name__}: give {wanted}"
    )


def round_up_to_batch(deliver_after_ms: int, batch_ms: int) -> int:
    """Return the end of the batch window that has the instant, epoch ms; 0 ms is no batches."""
    return -(-deliver_after_ms // batch_ms) * batch_ms if batch_ms else deliver_after_ms


def new_unique() -> str:
    """Return a random unique part of an id."""
    return new_uniques(1)[0]


def new_uniques(count: int) -> list[str]:
    """Return several, in one call of the system's source: as quick as for one."""
    drawn = token_hex(UNIQUE_BYTES * count)
    digits = 2 * UNIQUE_BYTES
    return [drawn[start : start + digits] for start in range(0, len(drawn), digits)]


def encoded(payload: object, what: str, reason: Reason = Reason.MALFORMED) -> bytes | None:
    """Return the bytes to send; `what` names the payload in the error.

    Raises InvalidMessage (`reason`): only text and bytes are sent, nothing is serialised here.
    """
    if payload is None or isinstance(payload, bytes):
        return payload
    return _text(payload, what, reason, "bytes, text or None").encode()


def encoded_headers(
    headers: Headers | None, reserved: Sequence[str] = RESERVED_HEADERS
) -> list[H.Header]:
    """Return the sender's headers, in order. Raises InvalidMessage (bad-headers)."""
    return [
        (_header_name(name, reserved), encoded(value, f"header {name}", Reason.BAD_HEADERS))
        for name, value in _pairs(headers)
    ]


def check_not_transactional(properties: Mapping[str, Any]) -> None:
    """Raise InvalidMessage (in-transaction): readers would wait for its end, past the due time."""
    if properties.get("transactional.id"):
        raise InvalidMessage(
            Reason.IN_TRANSACTION,
            "a delayed record cannot be sent in a transaction: use a producer without one",
        )


def check_size(
    key: bytes | None, value: bytes | None, headers: Iterable[H.Header], max_bytes: int
) -> None:
    """Raise InvalidMessage (too-large) if key, value and headers have more bytes together."""
    in_headers = sum(
        len(name.encode()) + len(text or b"") + H.FRAME_BYTES for name, text in headers
    )
    size = len(key or b"") + len(value or b"") + in_headers
    if size > max_bytes:
        raise InvalidMessage(
            Reason.TOO_LARGE,
            f"key, value and headers are {size} bytes together, over max_message_bytes or what "
            f"the store takes ({max_bytes}): send less, or a reference to where the rest is",
        )


def _identity(due_ms: int, unique: object) -> MessageId:
    checked = check_unique(_text(unique, "the id", Reason.BAD_ID, "text"))
    return MessageId(due_ms=due_ms, unique=checked)


def _address(
    wanted: MessageSpec, settings: Settings, identity: MessageId
) -> list[tuple[str, bytes]]:
    topic = _text(wanted.topic, "the topic", Reason.BAD_TOPIC, "its name")
    headers = [
        (
            H.DUE_TOPIC,
            check_destination(topic, settings.namespace, reserved_topics(settings)).encode(),
        ),
        (H.DUE_AT_MS, b"%d" % identity.due_ms),
        (H.DUE_ID, identity.unique.encode()),
    ]
    if wanted.partition is not None:
        headers.append((H.DUE_PARTITION, b"%d" % _checked_partition(wanted.partition)))
    if wanted.cluster is not None:
        headers.append((H.DUE_CLUSTER, check_cluster(wanted.cluster).encode()))
    intake = native_topic(settings.namespace)
    allowed = settings.allow.get(intake)
    if allowed and not allowed.allows(topic, wanted.cluster):
        there = f" on cluster {wanted.cluster}" if wanted.cluster else ""
        raise InvalidMessage(
            Reason.NOT_ALLOWED,
            f"records of {intake} may not go to {topic}{there}: add it to allow",
        )
    return headers


def _delayed_topic(wanted: MessageSpec, settings: Settings) -> str:
    """Return the delayed topic of that name, or the one of the visible topic of that name."""
    if wanted.cluster is not None:
        raise InvalidMessage(
            Reason.UNKNOWN_CLUSTER,
            "a delayed topic is on this cluster: send to another with at or in_",
        )
    for name in (wanted.topic, f"{wanted.topic}{DELAYED}"):
        if name in enabled_delayed_topics(settings):
            return name
    raise InvalidMessage(
        Reason.NOT_DELAYED,
        f"{wanted.topic} is no delayed topic: put it under delayed_topics in the configuration",
    )


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


def _header_name(given: object, reserved: Sequence[str]) -> str:
    name = _text(given, "a header's name", Reason.BAD_HEADERS, "text")
    if name in reserved:
        raise InvalidMessage(
            Reason.BAD_HEADERS, f"header {name} is made from the arguments: leave it out"
        )
    # librdkafka takes a name up to its first NUL.
    if "\0" in name:
        raise InvalidMessage(
            Reason.BAD_HEADERS, f"header name {name!r} would be cut at its NUL: leave that out"
        )
    return name


def _checked_partition(partition: object) -> int:
    if type(partition) is int and 0 <= partition <= LAST_PARTITION:
        return partition
    raise InvalidMessage(
        Reason.BAD_PARTITION, f"partition {partition!r} is no whole number of 0 to {LAST_PARTITION}"
    )


def _check_expiry(headers: Iterable[H.Header]) -> None:
    # The last of a name counts, and null is never.
    value = dict(headers).get(H.DUE_EXPIRES_MS)
    if value is not None and not re.fullmatch(rb"[0-9]{1,18}", value):
        raise InvalidMessage(
            Reason.BAD_EXPIRY, f"header {H.DUE_EXPIRES_MS} is no whole number: write it in epoch ms"
        )


def _text(given: object, what: str, reason: Reason, wanted: str) -> str:
    """Return the text if it is one that can be encoded: a lone surrogate is no character."""
    if not isinstance(given, str):
        raise InvalidMessage(reason, f"{what} is of type {type(given).__name__}: give {wanted}")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(reason, f"{what} has a lone surrogate: send bytes instead") from None
    return given
