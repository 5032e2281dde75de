"""Progress: the offset that a real-time query has reached, kept while its batch goes on.

A real-time query commits its offsets at the end of a batch, half an hour apart. After a crash,
recovery would process all records since then again, and reading them back would take most of its
time. So the leader keeps an offset for each partition, before which every record is acknowledged:

    row      notes its offset in a property of the JVM: its task gave all before it to the producer
    thread   reads the notes each second, and flushes the producer
    commit   the notes, if the producer has delivered all that the query has given it
    restart  the query goes on from the commit

The last record of a partition counts as sent once its task fetches again: a task hands a record to
the producer before it polls.

Progress is kept in local mode only: the driver cannot flush an executor's producer.
"""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.core.errors import KafkaError
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import LogIdentity, Offsets, Partition, belongs
from duetime.spark import catalyst
from duetime.spark.kafka_io import sink_options
from duetime.spark.producer_pool import HeldProducer
from duetime.spark.task_jvms import DriverJvm, JvmBeans

log = logging.getLogger(__name__)

#: The interval of commits, in seconds.
INTERVAL_S = 1.0

#: Time limit for a commit to end at a stop, in seconds.
STOP_S = 5.0

#: Reads of the group that Kafka refuses in a row, after which a query starts without progress.
MAX_REFUSALS = 2

#: Kafka's beans of consumers, and an attribute.
CONSUMERS, FETCHES = "kafka.consumer:type=consumer-fetch-manager-metrics", "fetch-total"


class LastRecords:
    """Finds the noted records of which the task has given all rows to the producer."""

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


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a query, in real time."""

    name: str
    #: Differs from those of other runs in this process.
    number: str
    #: The prefix of its consumers' groups: those of recovery read the same partitions.
    group_prefix: str
    #: The topics' ids, which its checkpoint was inspected with.
    topic_ids: Mapping[str, str]
    #: None once it has failed to deliver: recovery has to look at all since the last commit.
    producer: HeldProducer | None
    last_records: LastRecords = field(default_factory=LastRecords)
    #: The offsets that are committed.
    committed: dict[Partition, int] = field(default_factory=dict)
    has_failed_commit: bool = False

    def release(self) -> None:
        """Let go of the producer: nothing is committed from now on."""
        if self.producer is not None:
            self.producer.release()
        self.producer = None


class ProgressKeeper:
    """Keeps the progress of a leader's real-time queries. Holds a connection: close it."""

    def __init__(self, settings: Settings, jvm: DriverJvm | None) -> None:
        """`jvm` is None where tasks run in others: then nothing is noted."""
        self._settings, self._jvm = settings, jvm
        self._offsets = Offsets(settings, TopicNames(settings).progress_group)
        self._prefix = f"{settings.namespace}.progress/"
        self._numbers = count()
        #: By query, how often in a row Kafka has not answered about the group.
        self._refused = Counter[str]()
        #: By query.
        self._runs: dict[str, Run] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = PeriodicThread("progress", INTERVAL_S, self._step)

    def start(self) -> None:
        """Begin to read notes."""
        if self._jvm is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop, and close the connection."""
        with self._lock:
            self._is_closed = True
        self._thread.stop(STOP_S)
        for name in list(self._runs):
            self._end(name)
        self._offsets.close()

    def resume_offsets(self, name: str, topics: Sequence[str]) -> dict[Partition, int]:
        """End the query's last run; return the offsets before which all records have moved on.

        What is not committed is recovery's from now on. Raises KafkaError, but when Kafka refuses
        the group again and again, no progress is kept: a user without rights to it may get no
        answer.
        """
        self._end(name)
        partitions = [at for topic in topics for at in self._offsets.readable_partitions(topic)]
        ids, ends = self._offsets.topic_ids(topics), self._offsets.ends(partitions)
        try:
            found = {
                place: one.offset
                for place, one in self._offsets.commits(partitions).items()
                # Another tool's commit has no note.
                if one.note and belongs(one, ends[place], ids.get(place[0]))
            }
            # The others would seem to belong once the log has grown past them.
            self._offsets.commit({place: 0 for place in partitions if place not in found})
        except KafkaError as error:
            self._refused[name] += 1
            if self._refused[name] < MAX_REFUSALS:
                raise
            log.warning("progress is not kept, check the rights to its group error=%s", error)
            return {}
        self._refused[name] = 0
        return found

    def committed(self, name: str) -> dict[Partition, int]:
        """Return what is committed of the query's present run."""
        run = self._runs.get(name)
        return dict(run.committed) if run else {}

    def begin_run(self, name: str, topic_ids: Mapping[str, str]) -> Run | None:
        """Begin a run of the query, before it has its first row; None where nothing is noted."""
        if self._jvm is None or self._refused[name] >= MAX_REFUSALS:
            return None
        producer = self._jvm.hold_producer(sink_options(self._settings, name))
        with ExitStack() as unless_ready:
            unless_ready.callback(producer.release)
            if not producer.is_ready():
                return None
            unless_ready.pop_all()
        # A process that leads again finds notes of its earlier terms.
        number = f"{self._settings.term}.{next(self._numbers)}"
        found = Run(
            name=name,
            number=number,
            group_prefix=f"{self._settings.namespace}.{name}.{number}",
            topic_ids=topic_ids,
            producer=producer,
        )
        with self._lock:
            if self._is_closed:
                found.release()
            else:
                self._runs[name] = found
        return found

    def with_notes(self, run: Run, records: DataFrame) -> DataFrame:
        """Return the records of the run, which note their offsets."""
        return records.where(_note(self._prefix + run.name, run.number))

    def _step(self) -> None:
        if self._jvm is None:
            return
        notes = self._notes(self._jvm)
        for run in list(self._runs.values()):
            if run.producer and not self._is_closed:
                consumers = SourceConsumers(self._jvm.beans, run.group_prefix)
                given = run.last_records.add(notes[run.name, run.number], consumers.fetches)
                self._commit_reached(run, run.producer, given)

    def _end(self, name: str) -> None:
        # A commit that is just being made is true all the same.
        with self._lock:
            run = self._runs.pop(name, None)
        if run:
            run.release()

    def _commit_reached(
        self, run: Run, producer: HeldProducer, given: Mapping[Partition, int]
    ) -> None:
        changed = {at: offset for at, offset in given.items() if run.committed.get(at) != offset}
        # Also where nothing has changed: the pool does not replace a broken one that is held.
        if not producer.flush():
            log.info("progress is not committed until the query has recovered query=%s", run.name)
            run.release()
            return
        notes = {at: LogIdentity(topic_id=run.topic_ids.get(at[0])).text() for at in changed}
        try:
            self._offsets.commit(changed, notes)
        except KafkaError as error:
            level = logging.DEBUG if run.has_failed_commit else logging.WARNING
            log.log(level, "could not commit progress query=%s error=%s", run.name, error)
            run.has_failed_commit = True
        else:
            run.committed.update(changed)
            run.has_failed_commit = False

    def _notes(self, jvm: DriverJvm) -> defaultdict[tuple[str, str], dict[Partition, int]]:
        """Return the notes of each run, by its name and number."""
        notes = defaultdict[tuple[str, str], dict[Partition, int]](dict)
        for place, note in jvm.properties(self._prefix).items():
            name, topic, partition = place.removeprefix(self._prefix).split("/")
            number, offset = note.split("/")
            notes[name, number][topic, int(partition)] = int(offset)
        return notes


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
