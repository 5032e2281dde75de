"""The failures query: what could not be delivered is tried again later, or becomes a dead letter.

A micro-batch query over `duetime.failed`. A retry is a message that waits once more: in a lane or
in the wheel, with the instant of the retry in its state. Times are taken from the record and not
from a clock, so a batch that is repeated makes the same retries, and slots drop one of two.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.columns import (
    backoff_ms,
    header,
    header_map,
    now_ms,
    state_number,
    state_text,
    waiting_text,
)
from duetime.config import Settings
from duetime.envelopes import record_headers
from duetime.envelopes.control import control
from duetime.errors import Reason
from duetime.message import (
    DUE_AT_MS,
    DUE_STATE,
    WAITING_HEADERS,
)
from duetime.pipeline.destinations import Destinations, look_for
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.kafka import write_batch
from duetime.pipeline.refusals import asks_to_cancel
from duetime.pipeline.routing import Routes
from duetime.pipeline.rows import (
    Failure,
    Waiting,
    choose,
    detail,
    last_words,
    reason,
    waiting_record,
    without_reason,
)
from duetime.pipeline.seen import Seen
from duetime.pipeline.written import Repeat, Repeats, Written, identified, scope_of_waiting
from duetime.topics import TopicNames

#: Reasons that no retry will change.
FINAL = (Reason.EXPIRED,)


def failures(
    settings: Settings,
    destinations: Mapping[str | None, Destinations],
    written: Written,
    begun_ms: int,
) -> Callable[[DataFrame, int], None]:
    """What to do with each batch of the query. Runs on the driver; its rows in executors.

    `destinations` are those of this cluster, under None, and of others by their name; `begun_ms` is
    when the query began, epoch ms.
    """
    repeats = Repeats(written, begun_ms)
    cancels = Seen()

    def without_written(batch: DataFrame, repeat: Repeat) -> DataFrame:
        left = repeat.sieve.without(identified(batch), repeat.scope)
        if new := _cancels(repeat, settings):
            cancels.add(new, records=1)
        return _without(left, cancels.ids, settings) if cancels.ids else left

    def handle(batch: DataFrame, number: int) -> None:
        found = scope_of_waiting(batch)
        if found is None:
            return
        look_for(found.destinations, destinations)
        repeat = repeats.of(number, lambda: found)
        left = without_written(batch, repeat) if repeat else batch
        write_batch(judged(left, settings), settings, "failures")
        reach(Point.FAILURES_SENT)

    return handle


def _cancels(repeat: Repeat, settings: Settings) -> DataFrame | None:
    """What was cancelled in time since those of the batch have failed: `id` and `due_ms`."""
    sent = repeat.sieve.taken_in(TopicNames(settings).control, repeat.scope.since_ms)
    if sent is None:
        return None
    read = sent.select("*", header_map(record_headers()).alias("by_name"))
    asked = read.select("*", control().struct().alias("asked"))
    due_ms = F.col("asked.due_ms")
    in_time = F.unix_millis("timestamp") + settings.horizon_ms <= due_ms
    known = asked.where(asks_to_cancel() & F.col("asked.refusal").isNull() & in_time)
    return known.select(F.col("key").cast("string").alias("id"), due_ms.alias("due_ms")).distinct()


def _without(failed: DataFrame, cancels: DataFrame, settings: Settings) -> DataFrame:
    """Without those whose retry was taken up with its cancel: nothing of it is left anywhere."""
    timed = failed.select("*", *_failure()).select("*", *_retry(settings))
    same = F.col("failed.id") == F.col("cancel.id")
    at_its_time = F.col("failed.retry_ms") == F.col("cancel.due_ms")
    left = timed.alias("failed").join(cancels.alias("cancel"), same & at_its_time, "left_anti")
    return left.select(*failed.columns)


def judged(failed: DataFrame, settings: Settings) -> DataFrame:
    """Rows for the sink: to the destination after all, to wait for a retry, or to the dead."""
    routes, now = Routes(settings), F.col("now")
    message = waiting_record()
    was_unknown = F.col("reason") == str(Reason.UNKNOWN_TOPIC)
    known = failed.select("*", *_failure()).select(
        "*",
        *_retry(settings),
        now_ms().alias("now"),
        routes.known(F.when(was_unknown, message.topic), message.cluster),
    )
    why = F.when(was_unknown, routes.obstacle(message, now))
    again = _again(message)
    soon = again.due_ms - now < settings.horizon_ms
    found = was_unknown & F.col("why").isNull()
    to = choose(
        (~message.is_whole, routes.rejected(F.lit(str(Reason.UNREADABLE)), _foreign())),
        # With this attempt in its state: on the way to another cluster, it is further than before.
        (found, routes.delivered(_tried(message, retry_ms=_retried_ms(message)))),
        (_is_over(message), routes.dead(without_reason(message), _last_words())),
        (soon, routes.lane(again, now)),
        otherwise=routes.store(again, now),
    )
    return routes.rows(known, why, to)


def _failure() -> list[Column]:
    """reason, attempts (this one included), first_ms and last_ms (epoch ms)."""
    state = waiting_text(F.col("headers"), DUE_STATE)
    last_ms = F.unix_millis("timestamp")
    return [
        reason().alias("reason"),
        (F.coalesce(state_number(state, "attempts"), F.lit(0)) + 1).alias("attempts"),
        F.coalesce(state_number(state, "failed"), last_ms).alias("first_ms"),
        last_ms.alias("last_ms"),
    ]


def _retry(settings: Settings) -> list[Column]:
    """most_attempts, and retry_ms: exponential back-off, spread by the id over half of it."""
    message = waiting_record()
    most, first_ms = _by_topic(settings, "attempts"), _by_topic(settings, "backoff_ms")
    most_ms, attempts = F.lit(settings.retry_backoff_max_ms), F.col("attempts")
    wait_ms = backoff_ms(attempts, first_ms, most_ms, spread=[message.id, attempts])
    retry_ms = F.col("last_ms") + wait_ms
    return [most.alias("most_attempts"), retry_ms.alias("retry_ms")]


def _by_topic(settings: Settings, name: str) -> Column:
    """`retry_<name>`, or what `retry_topics` has for the destination."""
    topic = waiting_record().topic
    chosen = F.lit(getattr(settings, f"retry_{name}"))
    for each, policy in settings.retry_topics.items():
        value = getattr(policy, name)
        if value is not None:
            chosen = F.when(topic == each, F.lit(value)).otherwise(chosen)
    return chosen


def _is_over(message: Waiting) -> Column:
    final = F.col("reason").isin([str(each) for each in FINAL])
    expires = F.coalesce(message.expires_ms < F.col("retry_ms"), F.lit(False))
    return final | expires | (F.col("attempts") >= F.col("most_attempts"))


def _again(message: Waiting) -> Waiting:
    """The message as it waits for its retry."""
    retry_ms = F.col("retry_ms")
    return replace(_tried(message, retry_ms), due_ms=retry_ms)


def _retried_ms(message: Waiting) -> Column:
    """The instant of the retry that has just failed; null if it was the first attempt."""
    return state_number(waiting_text(message.headers, DUE_STATE), "retry")


def _tried(message: Waiting, retry_ms: Column) -> Waiting:
    """The message with this attempt in its state."""
    state = state_text(
        taken=message.taken_ms,
        expires=message.expires_ms,
        retry=retry_ms,
        attempts=F.col("attempts"),
        failed=F.col("first_ms"),
        cluster=message.cluster,
    )
    at = WAITING_HEADERS.index(DUE_STATE)
    bare = without_reason(message).headers
    headers = F.concat(
        F.slice(bare, 1, at), F.array(header(DUE_STATE, state)), F.slice(bare, at + 2, F.size(bare))
    )
    return replace(message, headers=headers)


def _last_words() -> Column:
    message = waiting_record()
    failure = Failure(
        reason=F.col("reason"),
        detail=detail(),
        attempts=F.col("attempts"),
        first_ms=F.col("first_ms"),
        last_ms=F.col("last_ms"),
    )
    return last_words(message, waiting_text(message.headers, DUE_AT_MS), failure)


def _foreign() -> Column:
    return F.lit("no record of a failure: who wrote it?")
