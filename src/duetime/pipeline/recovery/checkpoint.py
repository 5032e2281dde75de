"""Checkpoints of the queries: complete, and of the topics that exist, before a query starts.

Spark goes on from a checkpoint whatever has become of the topics since. It replaces offsets beyond
the end of a partition by that end, so the records there would be skipped; and a file that a power
cut has left empty keeps the query from starting. So each checkpoint is inspected first:

    torn files at the end of a log     removed: their batch runs again
    unfinished files before any batch  removed: Spark would not start
    its id, state or every batch torn  the checkpoint is removed
    offsets of another topic           the checkpoint is removed (topic and cluster ids differ)
    offsets beyond a partition's end   the checkpoint is removed

Without a checkpoint a query starts at the earliest record: messages that have moved on are read
back, as after a crash, and none is skipped. Cluster and topic ids are noted in a file next to
Spark's, by Spark's file system: so they are kept, copied and lost together.
"""

import json
import logging
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from duetime.core.errors import KafkaError
from duetime.core.settings import Settings
from duetime.kafka.offsets import OffsetRange, Offsets, Partition, is_same_topic
from duetime.spark.catalyst import java_class
from duetime.spark.kafka_io import offsets_json
from duetime.spark.session import jvm

log = logging.getLogger(__name__)

#: Spark's folders with a file for each batch: the offsets that it is to read, and that it is done.
PLANNED, DONE = "offsets", "commits"
#: Spark's folder with where each source of a query began, the file with the query's id, and the
#: folder with the state of a query that has any.
SOURCES, METADATA, STATE = "sources", "metadata", "state"

#: Hadoop's exceptions for a file that is not as it was written.
TORN = ("org.apache.hadoop.fs.ChecksumException", "java.io.EOFException")

#: Spark's version of these files, a setting that a batch's metadata has, and the rest of it.
VERSION, PARTITIONS = "v1", "spark.sql.shuffle.partitions"
FIRST_BATCH = {"batchWatermarkMs": 0, "batchTimestampMs": 0}

#: Duetime's file in each checkpoint.
NOTE = "duetime.json"

#: Time limit for the broker to answer while queries run, in seconds: others wait behind it.
TOPIC_IDS_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsNote:
    """The topics that a checkpoint's offsets are of."""

    cluster_id: str | None = None
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: bytes | None) -> Self:
        """Read a note. A torn one is empty."""
        try:
            return cls(**json.loads(text or b"{}"))
        except (ValueError, TypeError):
            return cls()

    def is_same(self, topic: str, there: "TopicsNote") -> bool:
        """Return whether the topic that is there is the noted one, as far as that is known."""
        if not is_same_topic(self.cluster_id, there.cluster_id):
            return False
        return is_same_topic(self.topic_ids.get(topic), there.topic_ids.get(topic))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """The result of an inspection."""

    #: Offsets that the query has reached, of the partitions where they are valid; empty without a
    #: checkpoint.
    offsets: Mapping[Partition, int]
    #: Topics with offsets that are of another log.
    invalid_topics: frozenset[str]
    #: Why Spark may not go on from it, a sentence each.
    problems: tuple[str, ...]


class Checkpoints:
    """Inspects checkpoints before queries start. Not thread-safe, except `recreated_topics`."""

    def __init__(self, spark: SparkSession, settings: Settings, offsets: Offsets) -> None:
        """The caller closes `offsets`."""
        self._spark, self._root, self._offsets = spark, settings.checkpoint, offsets
        #: By query, its topics when the checkpoint was inspected, and when the query was started.
        self._inspected: dict[str, TopicsNote] = {}
        self._noted: dict[str, TopicsNote] = {}
        self._is_closed = False

    def open(self, name: str, topics: Sequence[str], problems: Sequence[str] = ()) -> None:
        """Make the checkpoint of a query one that Spark can go on from. Raises KafkaError.

        Known `problems` of the checkpoint are reasons to remove it.
        """
        if found := [*self.inspect(name, topics).problems, *problems]:
            self.remove(name, found)
        self.note(name)

    def inspect(self, name: str, topics: Sequence[str]) -> CheckpointState:
        """Remove torn files at the end of the logs, and check the rest. Raises KafkaError."""
        files = self._files(name)
        logs = CheckpointLogs(name, files)
        unreadable = logs.repair()
        done = logs.done()
        offsets = {at: end for at, end in (done | logs.planned()).items() if at[0] in topics}
        there = TopicsNote(
            cluster_id=self._offsets.cluster_id(), topic_ids=self._offsets.topic_ids(topics)
        )
        noted = TopicsNote.parse(files.read(NOTE))
        self._inspected[name] = there
        ends = self._ends(offsets)
        other = sorted({topic for topic, _ in offsets if not noted.is_same(topic, there)})
        beyond = sorted(
            at for at in offsets if offsets[at] > ends.get(at, 0) and at[0] not in other
        )
        problems = [
            *([unreadable] if unreadable else []),
            *(f"topic {topic} was created again, or is another cluster's" for topic in other),
            *(
                f"partition {at[1]} of {at[0]} ends at {ends.get(at, 0)}, and {offsets[at]} was "
                "read: check whether the brokers lost records"
                for at in beyond
            ),
        ]
        return CheckpointState(
            offsets={
                at: end
                for at, end in done.items()
                if at in offsets and at[0] not in other and at not in beyond
            },
            invalid_topics=frozenset({*other, *(topic for topic, _ in beyond)}),
            problems=tuple(problems),
        )

    def remove(self, name: str, problems: Sequence[str]) -> None:
        """Remove a checkpoint, and log why. Its query starts as one without a checkpoint."""
        for each in problems:
            log.error(
                "checkpoint not used: reading from the earliest record, without delivered "
                "messages query=%s reason=%s",
                name,
                each,
            )
        self._files(name).delete("")

    def note(self, name: str) -> None:
        """Note the ids of the topics that the checkpoint was inspected with."""
        files, there = self._files(name), self._inspected[name]
        if TopicsNote.parse(files.read(NOTE)) != there:
            files.write(NOTE, json.dumps(asdict(there)))
        self._noted[name] = there

    def advance(
        self,
        name: str,
        starts: Mapping[Partition, int],
        *,
        starting: Mapping[Partition, int] | None = None,
        reached: Mapping[Partition, int] | None = None,
    ) -> dict[Partition, int]:
        """Let a query without state go on from where it has got to; return these offsets.

        That is its last commit, or the `starting` offsets of a new checkpoint, and what it has
        `reached` since. Nor does it go on before its partitions' `starts`, where a real-time query
        fails. A batch that was begun and not committed is forgotten: it may be half an hour of
        records. Without a commit or starting offsets, nothing is known of what it has reached.
        """
        logs = CheckpointLogs(name, self._files(name))
        done = logs.done()
        known = starting or done
        ahead = (reached or {}) if known else {}
        begin = {at: max(start, known.get(at, 0), ahead.get(at, 0)) for at, start in starts.items()}
        if not begin == done == logs.planned():
            self.commit(name, begin)
        return begin

    def commit(self, name: str, ends: Mapping[Partition, int]) -> None:
        """Let a query without state, which is not running, go on from these offsets.

        Raises KafkaError after `close`.
        """
        self.require_open()
        # Of the settings, Spark requires this one; the others are about state.
        first = FIRST_BATCH | {"conf": {PARTITIONS: self._spark.conf.get(PARTITIONS)}}
        CheckpointLogs(name, self._files(name)).append(ends, first)

    def batches(
        self,
        name: str,
        begin: Mapping[Partition, int],
        ends: Mapping[Partition, int],
        sizes: tuple[int, int],
    ) -> Iterator[list[OffsetRange]]:
        """Yield the records between these offsets in batches; commit each before the next one.

        `sizes` are the largest numbers of records: in the first batch, and in any.
        """
        first, size = sizes
        done, limit = dict(begin), min(first, size)
        while ranges := next_ranges(done, ends, limit):
            yield ranges
            done |= {each.place: each.end for each in ranges}
            self.commit(name, done)
            limit = size

    def close(self) -> None:
        """Commit nothing from now on: another leader may go on from these checkpoints."""
        self._is_closed = True

    def require_open(self) -> None:
        """Raise KafkaError after `close`: a query that is still being started must not run."""
        if self._is_closed:
            raise KafkaError("the lead was lost while the query was started")

    def topic_ids(self, name: str) -> Mapping[str, str]:
        """Return the ids of the topics that the query's checkpoint was inspected with."""
        return self._noted[name].topic_ids

    def recreated_topics(self) -> dict[str, str]:
        """Return, by query, a topic that it reads and that was created again since it started.

        From any thread. Empty if Kafka does not answer in time.
        """
        noted = dict(self._noted)
        topics = {topic for each in noted.values() for topic in each.topic_ids}
        try:
            ids = self._offsets.topic_ids(topics, TOPIC_IDS_TIMEOUT_S)
        except KafkaError:
            return {}
        return {
            name: topic
            for name, each in noted.items()
            for topic, topic_id in each.topic_ids.items()
            if not is_same_topic(topic_id, ids.get(topic))
        }

    def _ends(self, places: Iterable[Partition]) -> dict[Partition, int]:
        """Return where these partitions end, without those that do not exist."""
        wanted = set(places)
        there = {
            place
            for topic in {topic for topic, _ in wanted}
            for place in self._offsets.readable_partitions(topic)
        }
        return self._offsets.ends(wanted & there)

    def _files(self, name: str) -> "CheckpointFiles":
        return CheckpointFiles(self._spark, f"{self._root}/{name}")


def next_ranges(
    done: Mapping[Partition, int], ends: Mapping[Partition, int], size: int
) -> list[OffsetRange]:
    """Return the next records of each partition that is behind, about `size` in all."""
    left = {at: end - done[at] for at, end in ends.items() if end > done[at]}
    share = min(1.0, size / max(sum(left.values()), 1))
    return [
        OffsetRange(*at, done[at], done[at] + math.ceil(behind * share))
        for at, behind in left.items()
    ]


class CheckpointLogs:
    """Spark's logs in one checkpoint, read as Spark reads them."""

    def __init__(self, name: str, files: "CheckpointFiles") -> None:
        self._name, self._files = name, files

    def repair(self) -> str | None:
        """Remove torn files at the end of the logs; return why the rest is of no use, if so.

        A batch whose file is removed is made again: with the same records, and perhaps more.
        """
        planned, done = self._batches(PLANNED), self._batches(DONE)
        had_batches = bool(planned or done)
        # Spark reads the last two.
        while planned and not all(self._is_complete(PLANNED, each) for each in planned[-2:]):
            self._remove(PLANNED, planned.pop())
        last = planned[-1] if planned else -1
        while done and not (done[-1] <= last and self._is_complete(DONE, done[-1])):
            self._remove(DONE, done.pop())
        if had_batches and not planned:
            return "none of its batches can be read"
        if not planned:
            # Spark refuses a first batch where a file is left that was never finished.
            for each in (PLANNED, DONE, METADATA):
                self._files.delete(each)
        if planned and not _is_json(self._files.read(METADATA) or b""):
            return f"its {METADATA} cannot be read"
        for name in self._initial():
            if _offsets(self._files.read(name), skipped=0) is None:
                if not planned:
                    return "where it began cannot be read"
                # It is of no use where there are batches.
                self._files.delete(name)
        return "its state cannot be read" if self._files.has_empty(STATE) else None

    def done(self) -> dict[Partition, int]:
        """Return the offsets that its last committed batch ends with, or that it began with."""
        done = set(self._batches(DONE))
        batches = [each for each in self._batches(PLANNED) if each in done]
        if batches:
            return self._ends_of(batches[-1])
        began: dict[Partition, int] = {}
        for name in self._initial():
            began |= _offsets(self._files.read(name), skipped=0) or {}
        return began

    def planned(self) -> dict[Partition, int]:
        """Return the offsets that its last batch ends with, committed or not."""
        batches = self._batches(PLANNED)
        return self._ends_of(batches[-1]) if batches else {}

    def append(self, ends: Mapping[Partition, int], first: Mapping[str, Any]) -> None:
        """Append a batch that ends with these offsets, in place of one that is not committed.

        `first` is the metadata of a batch without one before it.
        """
        planned, committed = self._batches(PLANNED), self._batches(DONE)
        while planned and planned[-1] not in committed:
            self._files.delete(f"{PLANNED}/{planned.pop()}")
        if not _is_json(self._files.read(METADATA) or b""):
            self._files.write(METADATA, json.dumps({"id": str(uuid.uuid4())}))
        batch = planned[-1] + 1 if planned else 0
        metadata = (_lines(self._files.read(f"{PLANNED}/{batch - 1}")) or [first])[0]
        self._write(PLANNED, batch, json.dumps(metadata), offsets_json(ends.items()))
        self._write(DONE, batch, json.dumps({"nextBatchWatermarkMs": 0}))

    def _write(self, folder: str, batch: int, *lines: str) -> None:
        self._files.write(f"{folder}/{batch}", "\n".join([VERSION, *lines]))

    def _initial(self) -> list[str]:
        """Return the files that have where a source began."""
        return [
            f"{SOURCES}/{each}/0"
            for each in self._files.names(SOURCES)
            if "0" in self._files.names(f"{SOURCES}/{each}")
        ]

    def _ends_of(self, batch: int) -> dict[Partition, int]:
        return _offsets(self._files.read(f"{PLANNED}/{batch}"), skipped=1) or {}

    def _batches(self, folder: str) -> list[int]:
        return sorted(int(name) for name in self._files.names(folder) if name.isdecimal())

    def _is_complete(self, folder: str, batch: int) -> bool:
        data = self._files.read(f"{folder}/{batch}")
        found = _offsets(data, skipped=1) if folder == PLANNED else _lines(data)
        return found is not None

    def _remove(self, folder: str, batch: int) -> None:
        log.error(
            "removed a torn checkpoint file: its batch runs again, without delivered messages "
            "query=%s file=%s/%d",
            self._name,
            folder,
            batch,
        )
        self._files.delete(f"{folder}/{batch}")


class CheckpointFiles:
    """The files below a directory, by the file system that Spark uses for it."""

    def __init__(self, spark: SparkSession, directory: str) -> None:
        self._path = java_class(jvm(spark), "org.apache.hadoop.fs.Path")
        self._root = self._path(directory)
        context: Any = spark.sparkContext
        self._system = self._root.getFileSystem(context._jsc.hadoopConfiguration())  # noqa: SLF001 (PySpark's only way)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none where there is no such folder."""
        path = self._at(folder)
        if not self._system.exists(path):
            return []
        return [each.getPath().getName() for each in self._system.listStatus(path)]

    def has_empty(self, folder: str) -> bool:
        """Return whether a file is empty in the folder, or in one below it."""
        path = self._at(folder)
        if not self._system.exists(path):
            return False
        found = self._system.listFiles(path, True)
        while found.hasNext():
            each = found.next()
            # The state database's log may be empty.
            if each.getLen() == 0 and not each.getPath().getName().endswith(".log"):
                return True
        return False

    def read(self, name: str) -> bytes | None:
        """Return the file's bytes: none of a torn one, None where there is no such file."""
        path = self._at(name)
        if not self._system.exists(path):
            return None
        try:
            with closing(self._system.open(path)) as stream:
                return bytes(stream.readAllBytes())
        except Py4JJavaError as error:
            if error.java_exception.getClass().getName() not in TORN:
                raise
            return b""

    def write(self, name: str, text: str) -> None:
        """Write the file durably, in place of an old one."""
        with closing(self._system.create(self._at(name), True)) as stream:
            stream.write(text.encode())
            stream.hsync()

    def delete(self, name: str) -> None:
        """Delete the file, or the folder with all that is in it; "" is the directory itself."""
        self._system.delete(self._at(name), True)

    def _at(self, name: str) -> Any:  # noqa: ANN401 (py4j's objects have no type)
        return self._path(self._root, name) if name else self._root


def _lines(data: bytes | None) -> list[Any] | None:
    """Return the lines of one of Spark's log files behind its version; None of a torn one."""
    # One of them begins with a zero byte.
    version, *lines = (data or b"").decode(errors="replace").lstrip("\0").splitlines() or [""]
    if not lines or not re.fullmatch(r"v\d+", version.strip()):
        return None
    try:
        # A source that has not begun is a dash.
        return [None if line == "-" else json.loads(line) for line in lines]
    except ValueError:
        return None


def _offsets(data: bytes | None, skipped: int) -> dict[Partition, int] | None:
    """Return the offsets of all sources in one of Spark's log files; None of a torn one.

    The lines before them are `skipped`.
    """
    sources = (_lines(data) or [])[skipped:]
    try:
        found = {
            (topic, int(partition)): int(offset)
            for source in sources
            for topic, ends in (source or {}).items()
            for partition, offset in ends.items()
        }
    except (AttributeError, ValueError, TypeError):
        return None
    return found if sources else None


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except ValueError:
        return False
