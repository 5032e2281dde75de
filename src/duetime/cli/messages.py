"""send, show, cancel, reschedule: one message at a time."""

import os
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from duetime.cancelling import cancel_surely, find_waiting
from duetime.cli.connect import connected
from duetime.cli.display import facts, record_facts, when
from duetime.cli.options import (
    At,
    BadInput,
    Config,
    Id,
    In,
    Kafka,
    OnlyValue,
    Store,
    settings_from,
)
from duetime.client import Producer
from duetime.clock import SystemClock, delay, format_instant, instant
from duetime.config import Settings
from duetime.errors import InvalidMessage, KafkaError, Reason, RecordRefused
from duetime.message import MessageId
from duetime.outgoing import Wanted, new_unique
from duetime.reach import create_by_asking, require_intake
from duetime.recurrence import Recurrence
from duetime.recurring import record_of
from duetime.reschedule import reschedule as reschedule_message
from duetime.stores import Found
from duetime.stores.opening import open_reader


def send(  # noqa: PLR0913 (an option each)
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Where it is to be delivered.")],
    *,
    in_: In = None,
    at: At = None,
    key: Annotated[str | None, typer.Option("--key", help="The record's key.")] = None,
    value: Annotated[str | None, typer.Option("--value", help="The payload, as text.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file with the payload.")] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="May be repeated.")
    ] = None,
    own_id: Annotated[
        str | None,
        typer.Option("--id", help="Your own id: with the same one and time, it is sent once."),
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", help="The destination's partition.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME", help="Where it is; one of the configuration."),
    ] = None,
    cron: Annotated[
        str | None,
        typer.Option("--cron", metavar="FIELDS", help="It comes again: '0 9 * * 1-5', @hourly."),
    ] = None,
    zone: Annotated[
        str | None, typer.Option("--zone", help="Where --cron has its hours: Europe/Berlin; UTC.")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="The last run is not later.")
    ] = None,
    misfire: Annotated[
        str | None,
        typer.Option("--misfire", help="What was missed comes: skip, once (default), or all."),
    ] = None,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Schedule a message, and print its id.

    The payload is --value, --file or stdin, byte for byte. With --cron it comes again and again,
    from now or from --at on, and what is printed is the name for duetime recurring.
    """
    recurrence = _recurrence(cron, zone, until, misfire)
    due_at, due_in = _due(at, in_, needed=recurrence is None)
    headers = [_header(each) for each in header or []]
    payload = _payload(value, file)
    settings = settings_from(kafka, config)
    wanted = Wanted(
        topic=topic,
        value=payload,
        key=None if key is None else os.fsencode(key),
        headers=headers,
        partition=partition,
        cluster=cluster,
    )
    _refuse_bad(wanted, settings, due_at, due_in, own_id, recurrence)
    cluster_has = require_intake(settings).topics
    failed: list[KafkaError] = []
    with Producer(settings) as producer:
        full_id = producer.produce(
            wanted.topic,
            wanted.value,
            key=wanted.key,
            headers=wanted.headers,
            at=due_at,
            in_=due_in,
            id=own_id,
            partition=wanted.partition,
            cluster=wanted.cluster,
            recurrence=recurrence,
            on_delivery=lambda error, _: failed.extend([error] if error else []),
        )
    if failed:
        raise _with_what_to_repeat(failed[0], full_id, recurrence)
    typer.echo(full_id)
    if cluster is not None and cluster not in settings.clusters:
        # The pipeline may know it: nobody else needs to.
        typer.echo(
            f"note: the configuration here has no cluster {cluster}: see that the pipeline's has "
            "it when this is due",
            err=True,
        )
    if cluster is None and topic not in cluster_has and not create_by_asking(settings, topic):
        # Brokers that create topics have done so by now, and not when the message is due.
        typer.echo(f"note: there is no topic {topic}: create it before this is due", err=True)


def _with_what_to_repeat(
    error: KafkaError, full_id: str, recurrence: Recurrence | None
) -> KafkaError:
    """The same with the options that make it the same message: who sends has not seen its id."""
    if isinstance(error, RecordRefused):
        return error
    if recurrence is not None:
        return KafkaError(f"{error.detail}: --id {full_id}")
    identity = MessageId.parse(full_id)
    due = format_instant(identity.due_ms)
    return KafkaError(f"{error.detail}: --id {identity.unique} --at {due}")


def show(
    message_id: Id,
    *,
    value: OnlyValue = False,
    kafka: Kafka = None,
    store: Store = None,
    config: Config = None,
) -> None:
    """Show all about a message that waits."""
    identity = MessageId.parse(message_id)
    settings, now_ms = connected(kafka, config, store), SystemClock().now_ms()
    found = find_waiting(identity, open_reader(settings), settings, now_ms)
    if value:
        sys.stdout.buffer.write(found.value or b"")
        return
    typer.echo(facts(_facts(found, now_ms)))


def cancel(
    message_id: Id, *, kafka: Kafka = None, store: Store = None, config: Config = None
) -> None:
    """Cancel a message, with a definite answer.

    One that could not be delivered, and waits to be tried again, is cancelled, too.

    Exit code 0: it will not be delivered. 3: too late. 4: no such message waits.
    """
    identity = MessageId.parse(message_id)
    cancel_surely(identity, connected(kafka, config, store), SystemClock())
    typer.echo(f"cancelled: {identity} will not be delivered")


def reschedule(  # noqa: PLR0913 (an option each)
    message_id: Id,
    *,
    in_: In = None,
    at: At = None,
    kafka: Kafka = None,
    store: Store = None,
    config: Config = None,
) -> None:
    """Give a message another time, and print its new id.

    One record does both: a crash leaves neither two of it nor none.
    """
    identity, (due_at, due_in) = MessageId.parse(message_id), _due(at, in_)
    settings = connected(kafka, config, store)
    typer.echo(reschedule_message(str(identity), at=due_at, in_=due_in, settings=settings))


def _due(
    at: str | None, in_: str | None, *, needed: bool = True
) -> tuple[datetime | None, timedelta | None]:
    if at is not None and in_ is not None:
        raise InvalidMessage(Reason.TWO_DUE_TIMES, "both --in and --at are given: leave one")
    if needed and at is None and in_ is None:
        raise InvalidMessage(Reason.NO_DUE_TIME, "say when it is due: --in 5s, or --at a time")
    return instant(at), delay(in_)


def _refuse_bad(  # noqa: PLR0913, PLR0917 (what `produce` is given)
    wanted: Wanted,
    settings: Settings,
    at: datetime | None,
    in_: timedelta | None,
    own_id: str | None,
    recurrence: Recurrence | None,
) -> None:
    """Raise InvalidMessage for what cannot be taken, before anybody is asked anything."""
    now_ms = SystemClock().now_ms()
    unique = new_unique() if own_id is None else own_id
    record_of(wanted, recurrence, settings, at=at, in_=in_, now_ms=now_ms, unique=unique)


def _recurrence(
    cron: str | None, zone: str | None, until: str | None, misfire: str | None
) -> Recurrence | None:
    if cron is None:
        if zone or until or misfire:
            raise BadInput("--zone, --until and --misfire belong to --cron: add it")
        return None
    return Recurrence.of(cron, zone=zone, until=instant(until), misfire=misfire)


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InvalidMessage(
            Reason.BAD_HEADERS, f"--header {text!r} is no header: write it as name=value"
        )
    return name, os.fsencode(value)


def _payload(value: str | None, file: Path | None) -> bytes:
    if value is not None and file is not None:
        raise BadInput("both --value and --file are given: leave one")
    if value is not None:
        return os.fsencode(value)
    if file is not None:
        return _read(file)
    if sys.stdin.isatty():
        raise BadInput("no payload: give --value or --file, or pipe it in")
    return sys.stdin.buffer.read()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadInput(f"--file {file} cannot be read ({error.strerror})") from error


def _facts(found: Found, now_ms: int) -> list[tuple[str, str]]:
    pairs = [
        ("id", str(found.id)),
        ("state", "cancelled" if found.cancelled else "waiting"),
        ("due", when(found.id.due_ms, now_ms)),
        ("topic", found.topic),
    ]
    if found.expires_ms is not None:
        pairs.append(("expires", when(found.expires_ms, now_ms)))
    return pairs + record_facts(found)
