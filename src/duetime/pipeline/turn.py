"""A turn: one job that empties a stretch of the wheel, whatever level it is of.

What is due soon is sent, each message at its time; what is due later is routed to a nearer slot. So
the release of a second, the cascade of a far slot and a rescue are the same job over other offsets,
and a record that a slot should not have (the ring came round, clocks moved) is routed again, never
dropped.

A turn reads its partitions in one task. That makes duplicates, cancels and order a matter of
sorting rows side by side: no shuffle, which would cost more than everything else.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import PriorityQueue

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from duetime.columns import now_ms, slept_until, source
from duetime.config import Settings
from duetime.errors import OutcomeKnown, Reason, words
from duetime.message import LATEST_MS
from duetime.metrics import CANCELLED
from duetime.pipeline.claims import read_claims
from duetime.pipeline.isolation import Isolation
from duetime.pipeline.kafka import DELIVERY_TIMEOUT_S, client_id, write_batch
from duetime.pipeline.planned import Observed, PlannedOnce
from duetime.pipeline.routing import Routes
from duetime.pipeline.rows import SinkRow, Waiting, choose, waiting_record
from duetime.pipeline.written import Scope, Written
from duetime.stores import Claim

log = logging.getLogger(__name__)

#: The order in which messages came: to the intake, and of those in one ms, to the slot.
ARRIVAL = ("taken_ms", "offset")

#: What counts the cancelled is called.
TURN = "turn"

#: What the producers of turns are called. A sink waits until its producer holds nothing any more,
#: whoever's records those are: so each turn has one of its own while it runs.
PRODUCERS = [f"{TURN}-{number}" for number in range(24)]

#: How long a failed turn's producer may take for what it still holds, in seconds.
QUIET_S = 3.0

#: How often is looked whether it holds anything, in seconds.
LOOK_S = 0.05


class Turn:
    """Sends or routes on what some claims hold, of whatever store.

    The columns are built once, and what takes up nobody else's work is planned once: there is a
    turn every second, and planning is most of what it costs.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        written: Written,
        isolation: Isolation | None = None,
    ) -> None:
        """`isolation` hears what has failed; None where nothing is sent."""
        self._isolation = isolation
        # The lowest first: few of them are ever opened.
        self._producers: PriorityQueue[tuple[int, str]] = PriorityQueue()
        for each in enumerate(PRODUCERS):
            self._producers.put(each)
        self._spark = spark
        self._written = written
        self._settings = settings
        self._readable = readable()
        self._later = _is_later(settings.horizon_ms).alias("later")
        self._of_its_id = _of_its_id()
        self._routes = Routes(settings)
        sent_to = F.when(~F.col("later"), F.col("due_topic"))
        known = self._routes.known(sent_to, F.col("cluster"))
        self._known = now_ms().alias("now"), known
        self._paced = _paced()
        self._why = _obstacle(self._routes)
        self._to = _next_place(self._routes)
        # By the kind of claims: a wheel may have to be emptied beside another store.
        self._planned = defaultdict[type[Claim], PlannedOnce](lambda: PlannedOnce(spark, self.rows))

    def __call__(self, claims: Sequence[Claim]) -> None:
        """Empty these; returns when everything is acknowledged.

        Safe to repeat with claims that know when they were begun: what is written is read back.
        Raises OutcomeKnown where it has failed, and may be repeated at once.
        """
        with self._producer() as producer:
            self._empty(claims, producer)

    @contextmanager
    def _producer(self) -> Iterator[str]:
        """The name of a producer that no other turn has meanwhile."""
        number, name = self._producers.get()
        begun_s = time.monotonic()
        try:
            yield name
        except Exception as error:
            if self._isolation and self._isolation.blame(error):
                self._raise_if_known(error, name, begun_s)
            raise
        finally:
            self._producers.put((number, name))

    def _raise_if_known(self, error: Exception, producer: str, begun_s: float) -> None:
        """Raise OutcomeKnown once the failed turn's producer holds nothing any more.

        Younger than its delivery timeout, no record of it can have been given up without an answer.
        """
        isolation, until_s = self._isolation, time.monotonic() + QUIET_S
        until_s = min(until_s, begun_s + DELIVERY_TIMEOUT_S)
        while isolation and time.monotonic() < until_s:
            if isolation.is_quiet(client_id(self._settings, producer)):
                raise OutcomeKnown(words(error)) from error
            time.sleep(LOOK_S)

    def _empty(self, claims: Sequence[Claim], producer: str) -> None:
        records = read_claims(self._spark, self._settings, claims)
        begun = [each.begun_ms for each in claims if each.begun_ms is not None]
        if begun:
            # What the first try left out is counted then, or never.
            write_batch(self.rows(records, min(begun)), self._settings, producer)
            return
        planned = self._planned[type(claims[0])].observed(records)
        write_batch(planned.rows, self._settings, producer)
        count_cancelled(planned)

    def route_cancels(self, claims: Sequence[Claim]) -> None:
        """Route on the cancels among these that are due later; they stay where they are, too.

        Safe to repeat: of several cancels with one id, a turn takes one.
        """
        message = waiting_record()
        records = read_claims(self._spark, self._settings, claims)
        cancels = records.where(message.is_cancel & message.is_whole)
        with self._producer() as producer:
            write_batch(self.rows(cancels), self._settings, producer)

    def rows(self, records: DataFrame, begun_ms: int | None = None) -> DataFrame:
        """Rows for the Kafka sink: first what is routed on, then in due order what is sent.

        Without what was written since `begun_ms`, when a turn of these records began before.
        """
        readable = records.select("*", *self._readable)
        if begun_ms is not None:
            scope = Scope(since_ms=begun_ms, destinations={None: _destinations(readable)})
            readable = self._written.without(readable, scope)
        return (
            readable.select("*", self._later)
            .coalesce(1)
            .transform(self._without_duplicates_and_cancelled)
            .sortWithinPartitions(_turn_of_each(), *ARRIVAL)
            .select("*", *self._known)
            .where(self._paced)
            .transform(self._routes.rows, self._why, self._to)
        )

    def _without_duplicates_and_cancelled(self, records: DataFrame) -> DataFrame:
        """Of the records with one id, a cancel if there is one, else the first."""
        first = records.select("*", *self._of_its_id).where("nth = 1")
        cancelled = F.col("is_cancel") & ~F.col("cancels_only")
        return first.observe(TURN, F.count_if(cancelled).alias("cancelled"))


def count_cancelled(planned: Observed) -> None:
    """Once its rows are sent. It fails nothing: it is only told."""
    try:
        CANCELLED.inc(planned.count())
    except Exception as error:  # noqa: BLE001 (whatever it was, the turn is sent)
        log.warning("could not count what was cancelled error=%s", words(error))


def _destinations(records: DataFrame) -> list[str]:
    """Where the messages among these are to go."""
    here = records.where("known and due_topic is not null and cluster is null")
    named = here.select("due_topic").distinct()
    return [row.due_topic for row in named.collect()]


def readable() -> list[Column]:
    """due_ms, id, taken_ms, due_topic, cluster, is_cancel, and whether it is `known` as ours."""
    message = waiting_record()
    known = message.is_whole
    return [
        F.when(known, message.due_ms).otherwise(0).alias("due_ms"),
        F.when(known, message.id).otherwise(source()).alias("id"),
        message.taken_ms.alias("taken_ms"),
        message.topic.alias("due_topic"),
        message.cluster.alias("cluster"),
        (known & message.is_cancel).alias("is_cancel"),
        known.alias("known"),
    ]


def _message() -> Waiting:
    """A readable record as a message, of columns that are there: what is planned stays small."""
    return replace(
        waiting_record(),
        topic=F.col("due_topic"),
        cluster=F.col("cluster"),
        due_ms=F.col("due_ms"),
    )


def _of_its_id() -> tuple[Column, Column]:
    """Which one it is of the records with its id, and whether those are `cancels_only`."""
    # All records with one id are in one task. By (due, id) and not id alone, because Spark sorts a
    # number by radix and a text by comparing.
    same = W.partitionBy("due_ms", "id").orderBy(F.col("is_cancel").desc(), *ARRIVAL)
    whole = same.rowsBetween(W.unboundedPreceding, W.unboundedFollowing)
    cancels_only = F.last("is_cancel").over(whole)
    return F.row_number().over(same).alias("nth"), cancels_only.alias("cancels_only")


def _is_later(horizon_ms: int) -> Column:
    """Whether the message is routed on. Said when it is read: by its turn it would be due soon."""
    return F.col("due_ms") - now_ms() > horizon_ms


def _turn_of_each() -> Column:
    # What is routed on must not wait for what is sent at its time. One number, sorted by radix.
    return F.when(F.col("later"), F.col("due_ms")).otherwise(F.col("due_ms") + LATEST_MS)


def _paced() -> Column:
    """True when a row that is sent is due; false for a cancel whose time has come.

    Runs in an executor, after the sort: the task sleeps from row to row.
    """
    due = slept_until(F.col("due_ms"), F.col("now"))
    return F.when(F.col("later"), True).when(F.col("is_cancel"), False).otherwise(due)


def _obstacle(routes: Routes) -> Column:
    sent = F.col("known") & ~F.col("later")
    return F.when(sent, routes.obstacle(_message(), now_ms()))


def _next_place(routes: Routes) -> SinkRow:
    """To the destination what is due, to its slot what is due later."""
    message = _message()
    why = routes.rejected(
        F.lit(str(Reason.UNREADABLE)), F.lit("no record of the wheel: who wrote it?")
    )
    return choose(
        (~F.col("known"), why),
        (F.col("later"), routes.store(message, F.col("now"))),
        otherwise=routes.sent(message),
    )
