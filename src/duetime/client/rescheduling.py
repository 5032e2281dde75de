"""Rescheduling: one record schedules a message again and cancels the old one.

Intake applies both or neither, at any crash: see `due-replaces` in docs/contracts.md.
"""

import hashlib
import re
from contextlib import closing
from datetime import datetime, timedelta

import confluent_kafka

from duetime.client.producer import PERMANENT_ERRORS, SINGLE_RECORD
from duetime.core import headers as H
from duetime.core.clock import Clock, SystemClock, format_duration
from duetime.core.errors import KafkaError, RecordRefused, TooLate, UnknownMessage
from duetime.core.messages import REPLACING_MS, MessageId, PendingMessage
from duetime.core.records import IntakeRecord, MessageSpec, due_time_ms, message_record
from duetime.core.settings import Settings, load_settings
from duetime.kafka.producer import producer_properties
from duetime.stores.factory import open_reader

#: Time for Kafka to acknowledge the record, in ms: a caller waits for it.
DELIVERY_TIMEOUT_MS = 10_000

#: Maximum length of the unique part of an id.
MAX_UNIQUE_LENGTH = 200


def reschedule(
    id: str,  # noqa: A002 (the field's word)
    *,
    at: datetime | None = None,
    in_: timedelta | None = None,
    settings: Settings | None = None,
    clock: Clock | None = None,
) -> str:
    """Give the pending message with this full id another due time, and return its new id.

    The new id is the old one with `~1`, then `~2`, ... Not safe to repeat: the old id is cancelled
    then, and unknown. If two callers reschedule a message at once, it is delivered at both times
    (once, if they are equal). A message that was sent a moment ago is still unknown.

    Raises InvalidMessage, UnknownMessage (not pending, or cancelled), TooLate (its release has
    begun or is near), and KafkaError, which says if anything has changed.
    """
    settings, clock = settings or load_settings(), clock or SystemClock()
    identity, now_ms = MessageId.parse(id), clock.now_ms()
    due_ms = due_time_ms(at, in_, now_ms)
    _check_not_near(identity, settings, now_ms)
    found = _pending_message(identity, settings, now_ms)
    record = _replacement(found, settings, due_ms=due_ms, now_ms=now_ms)
    _check_not_near(identity, settings, clock.now_ms())
    # Intake decides by the same timestamp: if it is too late, the old message stays.
    _check_not_near(identity, settings, _send(record, settings))
    return str(record.id)


def next_unique(unique: str) -> str:
    """Return an id that is not cancelled: `order-17`, then `order-17~1`, then `order-17~2`."""
    matched = re.fullmatch(r"(.+)~([1-9][0-9]{0,8})", unique)
    base, number = (matched[1], int(matched[2])) if matched else (unique, 0)
    # `@` marks the ids that intake makes: a sender's id may not begin with it.
    base = base.lstrip("@")
    suffix = f"~{number + 1}"
    if len(base) + len(suffix) > MAX_UNIQUE_LENGTH:
        base = hashlib.sha256(base.encode()).hexdigest()
    return base + suffix


def _check_not_near(identity: MessageId, settings: Settings, now_ms: int) -> None:
    """Raise TooLate if the old message might be delivered as well."""
    needed_ms = settings.short_delay_threshold_ms + REPLACING_MS
    if identity.due_ms - now_ms < needed_ms:
        raise TooLate(
            f"{identity} is due, or will be in less than {format_duration(needed_ms)}: too soon "
            "for another time (it may still be cancelled)"
        )


def _pending_message(identity: MessageId, settings: Settings, now_ms: int) -> PendingMessage:
    with closing(open_reader(settings)) as reader:
        found = reader.find(identity, now_ms)
    if found is not None and not found.cancelled:
        return found
    if found is None and identity.due_ms - now_ms < settings.short_delay_threshold_ms:
        raise TooLate(f"message {identity} is on its way or delivered, if it existed")
    state = "is cancelled" if found else "is not pending"
    raise UnknownMessage(f"message {identity} {state}, and cannot be rescheduled: send a new one")


def _replacement(
    found: PendingMessage, settings: Settings, *, due_ms: int, now_ms: int
) -> IntakeRecord:
    # Other envelopes pass on headers that intake would take for its instructions here.
    headers = H.without(found.headers, H.CONSUMED)
    if found.expires_ms is not None:
        headers.append((H.DUE_EXPIRES_MS, str(found.expires_ms).encode()))
    spec = MessageSpec(
        topic=found.topic,
        value=found.value,
        key=found.key,
        headers=headers,
        partition=found.partition,
        cluster=found.cluster,
    )
    unique = next_unique(found.id.unique)
    return message_record(
        spec, settings, due_ms=due_ms, now_ms=now_ms, unique=unique, replaces=found.id
    )


def _send(record: IntakeRecord, settings: Settings) -> int:
    """Send the record, and return when Kafka appended it, epoch ms. Raises KafkaError."""
    reports = list[tuple[confluent_kafka.KafkaError | None, confluent_kafka.Message]]()
    # If it arrives twice, it is still one message and one cancel, by their ids.
    producer = confluent_kafka.Producer(
        producer_properties(settings) | SINGLE_RECORD | {"delivery.timeout.ms": DELIVERY_TIMEOUT_MS}
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
            f"not rescheduled ({error.args[0].str()}): nothing has changed, try again"
        ) from error
    producer.flush()
    failure, appended = reports[0]
    if failure is None:
        return int(appended.timestamp()[1])
    if failure.code() in PERMANENT_ERRORS:
        raise RecordRefused(f"not rescheduled: Kafka refuses the record ({failure.str()})")
    raise KafkaError(
        f"it is not known if the message is rescheduled ({failure.str()}): check before you repeat"
    )
