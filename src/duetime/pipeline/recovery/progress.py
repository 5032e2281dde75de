"""Progress: the offset that a real-time query has reached, kept while its batch goes on.

A real-time query commits its offsets at the end of a batch, minutes apart, and recovery handles all
records since then again. Nearly all of them have moved on; to read that back takes longer than all
else. So the leader keeps an offset for each partition, before which every record is acknowledged:

    row      notes its offset in a property of the JVM: its task gave all before it to the producer
    thread   reads the notes each second, and then the metrics of the query's producer
    commit   once the producer has acknowledged, or given up, all that it held by then
    crash    recovery leaves out what lies before the commit

An empty buffer shows that all is acknowledged. A busy producer's buffer is never empty. But its
thread gives up each record that is older than `delivery.timeout.ms`, before it counts what it sends
next. So after that time, and some counts, the older records are acknowledged, or are errors: after
an error nothing is committed until the query has recovered and runs again.

The last record of a partition has a note, too. A task that fetches again has given it away.

Only where all tasks are in this process's JVM: the buffer of an executor that is lost would count
as empty.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.core.errors import KafkaError
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import LogIdentity, Offsets, Partition, belongs
from duetime.spark import catalyst
from duetime.spark.kafka_io import DELIVERY_TIMEOUT_S, client_id
from duetime.spark.task_jvms import DriverJvm, JvmBeans, PooledProducer

log = logging.getLogger(__name__)

#: The interval of readings, in seconds.
INTERVAL_S = 1.0

#: Times that the count of sent records has grown, after the delivery timeout. One loop of the
#: producer's thread may have begun before that; three are others.
GROWTHS = 3

#: How far the wall clock may move against the monotonic one between two readings, in seconds. Kafka
#: measures the delivery timeout by the wall clock.
CLOCK_STEP_S = 0.5


#: Kafka's beans of consumers, the names of those of Spark's streaming queries, and an attribute.
CONSUMERS, FETCHES = "kafka.consumer:type=consumer-fetch-manager-metrics", "fetch-total"
CLIENTS = "consumer-spark-kafka-source-*"


class Reading(NamedTuple):
    """The offsets that a run has come to, then its producer's metrics: read in this order."""

    at_s: float
    #: The wall clock less the monotonic one, in seconds.
    clock_s: float
    #: The offsets before which all is given to the producer.
    offsets: Mapping[Partition, int]
    sent: int
    unacknowledged_bytes: int
    #: Records that the producer could not deliver since the run began.
    errors: int
    #: It is broken, or another has its name.
    is_over: bool


class RunProgress:
    """Decides from readings which offsets of one run of a query are reached."""

    def __init__(self) -> None:
        self._has_failed = False
        self._last: Reading | None = None
        #: Readings whose records are not all acknowledged, the oldest first.
        self._pending = deque[_Pending]()

    def add(self, reading: Reading) -> Mapping[Partition, int]:
        """Take in the next reading; return the offsets before which all is acknowledged now."""
        last, self._last = self._last, reading
        self._has_failed = self._has_failed or reading.is_over or reading.errors != 0
        if self._has_failed or (last and abs(reading.clock_s - last.clock_s) > CLOCK_STEP_S):
            self._pending.clear()
            return {}
        if not reading.unacknowledged_bytes:
            self._pending.clear()
            return reading.offsets
        reached: Mapping[Partition, int] = {}
        has_grown = last is not None and reading.sent > last.sent
        for each in self._pending:
            is_over = last is not None and last.at_s - each.at_s > DELIVERY_TIMEOUT_S
            each.growths += is_over and has_grown
        while self._pending and self._pending[0].growths >= GROWTHS:
            reached = self._pending.popleft().offsets
        self._pending.append(_Pending(reading.at_s, reading.offsets))
        return reached


class RunProducer:
    """The producer of one run."""

    def __init__(self, find: Callable[[], PooledProducer | None]) -> None:
        """Call it before the run. `find` returns the producer that has its client id now."""
        self._find = find
        self._producer: PooledProducer | None = None
        before = find()
        self._before_ms = before.started_ms if before else None
        self._errors = before.errors() if before else 0

    def read(self, offsets: Mapping[Partition, int]) -> Reading | None:
        """Return a reading after these offsets were read; None where none was noted."""
        if self._producer is None:
            # A task opens it for its first row. The run ends before it is closed.
            self._producer = self._find() if offsets else None
            if self._producer is None:
                return None
            if self._producer.started_ms != self._before_ms:
                self._errors = 0
        at_s = time.monotonic()
        clock_s = time.time() - at_s
        sent, held = self._producer.sent(), self._producer.unacknowledged_bytes()
        # These are last, because what they tell of is in no buffer any more.
        errors = self._producer.errors() - self._errors
        return Reading(at_s, clock_s, offsets, sent, held, errors, self._producer.is_over())


class LastRecords:
    """Tells of which noted records the task has given all rows to the producer."""

    def __init__(self) -> None:
        self._notes: Mapping[Partition, int] = {}
        #: The fetches of the partition's consumer, once the note was the same twice.
        self._fetches: dict[Partition, tuple[int, int]] = {}
        self._given: dict[Partition, int] = {}

    def add(
        self, notes: Mapping[Partition, int], fetches: Callable[[Partition], int]
    ) -> dict[Partition, int]:
        """Take in the notes; return the offsets before which all is given to the producer.

        `fetches` counts the fetches of a partition's consumer, after the notes were read. A task
        handles a record to its end before it polls again, and only a poll completes a fetch.
        """
        for place, offset in notes.items():
            if self._given.get(place) == offset or self._notes.get(place) != offset:
                continue
            found = offset, fetches(place)
            before = self._fetches.setdefault(place, found)
            if before[0] != offset:
                self._fetches[place] = found
            elif found > before:
                self._given[place] = offset
        self._notes = notes
        return {at: offset + (self._given.get(at) == offset) for at, offset in notes.items()}


class _Pending:
    """A reading, and how often the count of sent records has grown since its time was up."""

    def __init__(self, at_s: float, offsets: Mapping[Partition, int]) -> None:
        self.at_s, self.offsets, self.growths = at_s, offsets, 0


class _Run(NamedTuple):
    """A run of a query."""

    number: str
    producer: RunProducer
    progress: RunProgress
    last_records: LastRecords
    #: By topic.
    topic_ids: Mapping[str, str]
    #: The offsets that are committed.
    committed: dict[Partition, int]


class ProgressKeeper:
    """Keeps the progress of a leader's real-time queries. Holds a connection: close it."""

    def __init__(self, settings: Settings, jvm: DriverJvm | None) -> None:
        """`jvm` is None where tasks run in others: then nothing is noted."""
        self._settings, self._jvm = settings, jvm
        self._offsets = Offsets(settings, TopicNames(settings).progress_group)
        self._prefix = f"{settings.namespace}.progress/"
        self._numbers = count()
        #: By query.
        self._runs: dict[str, _Run] = {}
        self._thread = PeriodicThread("progress", INTERVAL_S, self._step)

    def start(self) -> None:
        """Begin to read notes."""
        if self._jvm is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop, and close the connection."""
        self._thread.stop()
        self._offsets.close()

    def reached(self, topics: Sequence[str]) -> dict[Partition, int]:
        """Return the offsets before which all records have moved on. Raises KafkaError."""
        partitions = [each for topic in topics for each in self._offsets.readable_partitions(topic)]
        commits, ids = self._offsets.commits(partitions), self._offsets.topic_ids(topics)
        ends = self._offsets.ends(commits)
        return {
            place: one.offset
            for place, one in commits.items()
            if belongs(one, ends[place], ids.get(place[0]))
        }

    def noted(self, name: str, topics: Sequence[str], records: DataFrame) -> DataFrame:
        """Return the records of a run of the query that begins now, which note their offsets."""
        if self._jvm is None:
            return records
        # A process that leads again finds notes of its earlier terms.
        number = f"{self._settings.term}.{next(self._numbers)}"
        producer = RunProducer(partial(self._jvm.producer, client_id(self._settings, name)))
        ids = self._offsets.topic_ids(topics)
        self._runs[name] = _Run(number, producer, RunProgress(), LastRecords(), ids, {})
        return records.where(_note(self._prefix + name, number))

    def _step(self) -> None:
        if self._jvm is None:
            return
        runs = dict(self._runs)
        notes: dict[str, dict[Partition, int]] = {name: {} for name in runs}
        for place, note in self._jvm.properties(self._prefix).items():
            name, topic, partition = place.removeprefix(self._prefix).split("/")
            number, offset = note.split("/")
            # An earlier run of the query has left the others.
            if name in runs and number == runs[name].number:
                notes[name][topic, int(partition)] = int(offset)
        consumers = SourceConsumers(self._jvm.beans)
        for name, run in runs.items():
            given = run.last_records.add(notes[name], consumers.fetches)
            if reading := run.producer.read(given):
                self._commit(name, run, run.progress.add(reading))

    def _commit(self, name: str, run: _Run, reached: Mapping[Partition, int]) -> None:
        changed = {at: offset for at, offset in reached.items() if run.committed.get(at) != offset}
        notes = {at: LogIdentity(topic_id=run.topic_ids.get(at[0])).text() for at in changed}
        try:
            self._offsets.commit(changed, notes)
        except KafkaError as error:
            log.debug("could not commit progress query=%s error=%s", name, error)
        else:
            run.committed.update(changed)


class SourceConsumers:
    """The consumers of streaming queries, each of one partition."""

    def __init__(self, beans: JvmBeans) -> None:
        self._beans = beans

    def fetches(self, place: Partition) -> int:
        """Return how many fetches the consumers of a partition have completed."""
        return sum(
            int(values.get(FETCHES, 0))
            for client in self._clients[_tag(place[0]), place[1]]
            for _, values in self._beans.read(f"{CONSUMERS},client-id={client}", [FETCHES])
        )

    @cached_property
    def _clients(self) -> Mapping[Partition, list[str]]:
        found = defaultdict[Partition, list[str]](list)
        for keys in self._beans.keys(f"{CONSUMERS},client-id={CLIENTS},topic=*,partition=*"):
            found[_tag(keys["topic"]), int(keys["partition"])].append(keys["client-id"])
        return found


def _tag(topic: str) -> str:
    """Return a topic as Kafka's metrics name it. No cluster has two that differ only in this."""
    return topic.replace(".", "_")


def _note(prefix: str, number: str) -> Column:
    """boolean, always true: as a filter, it notes the offset of each record."""
    name = F.concat_ws("/", F.lit(prefix), "topic", "partition")
    before = catalyst.set_system_property(name, F.concat_ws("/", F.lit(number), "offset"))
    # No note has this value, but the optimiser does not know that.
    return F.coalesce(before != "..", F.lit(True))


def is_ahead(reached: Mapping[Partition, int]) -> Column:
    """boolean: the record is not before the offset that was reached in its partition."""
    if not reached:
        return F.lit(True)
    pairs = [
        F.lit(each)
        for (topic, partition), offset in reached.items()
        for each in (f"{topic}/{partition}", offset)
    ]
    first = F.create_map(*pairs)[F.concat_ws("/", "topic", "partition")]
    return F.coalesce(F.col("offset") >= first, F.lit(True))
