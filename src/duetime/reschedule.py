"""Giving a message another time: one record, which schedules it anew and cancels the old one.

Intake takes in both or neither, whatever stops in between: see `due-replaces` in docs/contracts.md.
"""

import hashlib
import re
from datetime import datetime, timedelta

import confluent_kafka

from duetime.client import AT_ONCE, FOR_GOOD, producer_properties
from duetime.clock import Clock, SystemClock, format_duration
from duetime.config import Settings, load_settings
from duetime.errors import KafkaError, RecordRefused, TooLate, UnknownMessage
from duetime.message import DUE_EXPIRES_MS, REPLACING_MS, TAKEN, MessageId, headers_without
from duetime.outgoing import Outgoing, Wanted, due_time_ms, scheduled
from duetime.stores import Found
from duetime.stores.opening import open_reader

#: How long Kafka may take for the record, in ms: whoever asked waits for that.
DELIVERY_TIMEOUT_MS = 10_000

#: The longest unique part of an id.
LONGEST_UNIQUE = 200


def reschedule(
    id: str,  # noqa: A002 (what all call it)
    *,
    at: datetime | None = None,
    in_: timedelta | None = None,
    settings: Settings | None = None,
    clock: Clock | None = None,
) -> str:
    """Give the waiting message with this full id another time, and return its new id.

    The new id is the old one with `~1`, then `~2`, ... Not safe to repeat: the old id is cancelled
    by then, and unknown. Two at once for one message, before the cancel of the first is in its
    slot: both are done, and the message is delivered at both times (once, if they are the same). A
    message that was sent a moment ago is unknown.

    Raises InvalidMessage, UnknownMessage (nothing with this id waits, or it is cancelled), TooLate
    (its release has begun or is near), and KafkaError (which says whether anything is changed).
    """
    settings, clock = settings or load_settings(), clock or SystemClock()
    identity, now_ms = MessageId.parse(id), clock.now_ms()
    due_ms = due_time_ms(at, in_, now_ms)
    _check_time_is_left(identity, settings, now_ms)
    found = _waiting(identity, settings, now_ms)
    again = rescheduled(found, settings, due_ms=due_ms, now_ms=now_ms)
    _check_time_is_left(identity, settings, clock.now_ms())
    # Intake decides by the same timestamp: where it is too late, the old message stays.
    _check_time_is_left(identity, settings, _appended_ms(again, settings))
    return str(again.id)


def rescheduled(found: Found, settings: Settings, *, due_ms: int, now_ms: int) -> Outgoing:
    """The record that takes the place of a waiting message; raises what `scheduled` does."""
    # Other envelopes have passed on headers that intake would take for itself here.
    headers = headers_without(found.headers, TAKEN)
    if found.expires_ms is not None:
        headers.append((DUE_EXPIRES_MS, str(found.expires_ms).encode()))
    wanted = Wanted(
        topic=found.topic,
        value=found.value,
        key=found.key,
        headers=headers,
        partition=found.partition,
        cluster=found.cluster,
    )
    return scheduled(
        wanted,
        settings,
        due_ms=due_ms,
        now_ms=now_ms,
        unique=next_unique(found.id.unique),
        replaces=found.id,
    )


def next_unique(unique: str) -> str:
    """`order-17` becomes `order-17~1`, that becomes `order-17~2`: never one that is cancelled."""
    base, number = _taken_apart(unique)
    # `@` marks the ids that intake made, and no sender may begin with it.
    base = base.lstrip("@")
    suffix = f"~{number + 1}"
    if len(base) + len(suffix) > LONGEST_UNIQUE:
        base = hashlib.sha256(base.encode()).hexdigest()
    return base + suffix


def _check_time_is_left(identity: MessageId, settings: Settings, now_ms: int) -> None:
    """Raise TooLate where the old one might be delivered, too."""
    needed_ms = settings.horizon_ms + REPLACING_MS
    if identity.due_ms - now_ms < needed_ms:
        raise TooLate(
            f"{identity} is due, or will be in less than {format_duration(needed_ms)}: too soon "
            "for another time (it may still be cancelled)"
        )


def _appended_ms(record: Outgoing, settings: Settings) -> int:
    """Send the record, and return when Kafka appended it, epoch ms. Raises KafkaError."""
    reports = list[tuple[confluent_kafka.KafkaError | None, confluent_kafka.Message]]()
    # Sent twice, it is one message and one cancel all the same, by their ids.
    producer = confluent_kafka.Producer(
        producer_properties(settings) | AT_ONCE | {"delivery.timeout.ms": DELIVERY_TIMEOUT_MS}
    )
    try:
        producer.produce(
            record.topic,
            value=record.value,
            key=record.key,
            headers=list(record.headers),
            on_delivery=lambda *report: reports.append(report),
        )
    except confluent_kafka.KafkaException as error:
        raise KafkaError(
            f"not done ({error.args[0].str()}): nothing is changed, try again"
        ) from error
    producer.flush()
    failed, appended = reports[0]
    if failed is None:
        return int(appended.timestamp()[1])
    if failed.code() in FOR_GOOD:
        raise RecordRefused(f"not done, as Kafka refuses the record ({failed.str()})")
    raise KafkaError(f"it is not known whether it is done ({failed.str()}): look before you repeat")


def _taken_apart(unique: str) -> tuple[str, int]:
    matched = re.fullmatch(r"(.+)~([1-9][0-9]{0,8})", unique)
    return (matched[1], int(matched[2])) if matched else (unique, 0)


def _waiting(identity: MessageId, settings: Settings, now_ms: int) -> Found:
    reader = open_reader(settings)
    try:
        found = reader.find(identity, now_ms)
    finally:
        reader.close()
    if found is not None and not found.cancelled:
        return found
    if found is None and identity.due_ms - now_ms < settings.horizon_ms:
        raise TooLate(f"message {identity} is on its way or delivered, if there was one")
    state = "is cancelled" if found else "does not wait"
    raise UnknownMessage(f"message {identity} {state}: send it anew, it cannot be rescheduled")
