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
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.core.errors import KafkaError
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import LogIdentity, Offsets, Partition, Unreadable, belongs
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

#: Kafka's beans of consumers, and an attribute.
CONSUMERS, FETCHES = "kafka.consumer:type=consumer-fetch-manager-metrics", "fetch-total"


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
    #: It may have dropped what it held, uncounted.
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
        """Return a reading after these offsets were read; None where they say nothing."""
        if self._producer is None:
            # A task opens it for its first row.
            self._producer = self._find() if offsets else None
            if self._producer is None:
                return None
            if self._producer.started_ms != self._before_ms:
                self._errors = 0
        at_s = time.monotonic()
        clock_s = time.time() - at_s
        sent, held = self._producer.sent(), self._producer.unacknowledged_bytes()
        # These are last, because what they tell of is in no buffer any more.
        errors, is_over = self._producer.errors() - self._errors, self._producer.is_over()
        if not sent and not held:
            # It has dropped its first records, if the broker refused it an id; or there were none.
            is_over = True
        return Reading(at_s, clock_s, offsets, sent, held, errors, is_over)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a query, in real time."""

    name: str
    #: Differs from those of other runs in this process.
    number: str
    #: The prefix of its consumers' groups: those of recovery read the same partitions.
    group_prefix: str
    #: The topics' ids, which its checkpoint was inspected with.
    topic_ids: Mapping[str, str]
    producer: RunProducer
    progress: RunProgress = field(default_factory=RunProgress)
    last_records: LastRecords = field(default_factory=LastRecords)
    #: The offsets that are committed.
    committed: dict[Partition, int] = field(default_factory=dict)


class ProgressKeeper:
    """Keeps the progress of a leader's real-time queries. Holds a connection: close it."""

    def __init__(self, settings: Settings, jvm: DriverJvm | None) -> None:
        """`jvm` is None where tasks run in others: then nothing is noted."""
        self._settings, self._jvm = settings, jvm
        self._offsets = Offsets(settings, TopicNames(settings).progress_group)
        self._prefix = f"{settings.namespace}.progress/"
        self._numbers = count()
        #: By query. Locked from the notes to the commit: a run that has ended commits nothing.
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._thread = PeriodicThread("progress", INTERVAL_S, self._step)

    def start(self) -> None:
        """Begin to read notes."""
        if self._jvm is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop, and close the connection."""
        self._thread.stop()
        self._offsets.close()

    def end(self, name: str) -> None:
        """End the query's run: what it has given to nobody is recovery's from now on."""
        with self._lock:
            self._runs.pop(name, None)

    def reached(self, topics: Sequence[str]) -> dict[Partition, int]:
        """Return the offsets before which all records have moved on; {} if Kafka does not say."""
        try:
            partitions = [at for topic in topics for at in self._offsets.readable_partitions(topic)]
            commits, ids = self._offsets.commits(partitions), self._offsets.topic_ids(topics)
            ends = self._offsets.ends(commits)
        except (KafkaError, Unreadable) as error:
            log.warning("progress is not known, reading back more error=%s", error)
            return {}
        return {
            place: one.offset
            for place, one in commits.items()
            # Another tool's commit has no note.
            if one.note and belongs(one, ends[place], ids.get(place[0]))
        }

    def run(self, name: str, topic_ids: Mapping[str, str]) -> Run | None:
        """Begin a run of the query; None where nothing is noted."""
        if self._jvm is None:
            return None
        # A process that leads again finds notes of its earlier terms.
        number = f"{self._settings.term}.{next(self._numbers)}"
        found = Run(
            name=name,
            number=number,
            group_prefix=f"{self._settings.namespace}.{name}.{number}",
            topic_ids=topic_ids,
            producer=RunProducer(partial(self._jvm.producer, client_id(self._settings, name))),
        )
        with self._lock:
            self._runs[name] = found
        return found

    def noted(self, run: Run, records: DataFrame) -> DataFrame:
        """Return the records of the run, which note their offsets."""
        return records.where(_note(self._prefix + run.name, run.number))

    def _step(self) -> None:
        if self._jvm is None:
            return
        with self._lock:
            notes = self._notes(self._jvm)
            for name, run in self._runs.items():
                consumers = SourceConsumers(self._jvm.beans, run.group_prefix)
                given = run.last_records.add(notes.get(name, {}), consumers.fetches)
                if reading := run.producer.read(given):
                    self._commit(run, run.progress.add(reading))

    def _notes(self, jvm: DriverJvm) -> Mapping[str, Mapping[Partition, int]]:
        notes = defaultdict[str, dict[Partition, int]](dict)
        for place, note in jvm.properties(self._prefix).items():
            name, topic, partition = place.removeprefix(self._prefix).split("/")
            number, offset = note.split("/")
            # An earlier run of the query has left the others.
            if name in self._runs and number == self._runs[name].number:
                notes[name][topic, int(partition)] = int(offset)
        return notes

    def _commit(self, run: Run, reached: Mapping[Partition, int]) -> None:
        changed = {at: offset for at, offset in reached.items() if run.committed.get(at) != offset}
        notes = {at: LogIdentity(topic_id=run.topic_ids.get(at[0])).text() for at in changed}
        try:
            self._offsets.commit(changed, notes)
        except KafkaError as error:
            log.debug("could not commit progress query=%s error=%s", run.name, error)
        else:
            run.committed.update(changed)


class SourceConsumers:
    """The consumers of one run, each of one partition."""

    def __init__(self, beans: JvmBeans, group_prefix: str) -> None:
        self._beans, self._names = beans, f"consumer-{group_prefix}-*"

    def fetches(self, place: Partition) -> int:
        """Return how many fetches the partition's consumer has completed."""
        return sum(
            int(values.get(FETCHES, 0))
            for client in self._clients[_tag(place[0]), place[1]]
            for _, values in self._beans.read(f"{CONSUMERS},client-id={client}", [FETCHES])
        )

    @cached_property
    def _clients(self) -> Mapping[Partition, list[str]]:
        found = defaultdict[Partition, list[str]](list)
        for keys in self._beans.keys(f"{CONSUMERS},client-id={self._names},topic=*,partition=*"):
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
