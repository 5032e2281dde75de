"""The files that Spark keeps of a query, read as Spark reads them; torn ones are removed."""

import json
import logging
import re
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from duetime.java import java_class
from duetime.pipeline.jvm import jvm
from duetime.stores.places import Place

log = logging.getLogger(__name__)

#: What Spark writes, for each batch a file: what it is to read, and that it has.
PLANNED, DONE = "offsets", "commits"
#: Where each source of a query began, and the query's id.
SOURCES, METADATA = "sources", "metadata"
#: What a query remembers, where it remembers anything.
STATE = "state"

#: What Hadoop says of a file that is not as it was written.
TORN = ("org.apache.hadoop.fs.ChecksumException", "java.io.EOFException")

#: The first line of each file in a log.
_VERSION = re.compile(r"v\d+")


class CheckpointLogs:
    """The logs of one checkpoint."""

    def __init__(self, name: str, files: "CheckpointFiles") -> None:
        self._name = name
        self._files = files

    def mend(self) -> str | None:
        """Drop torn files at the end of the logs; returns why the rest is of no use, if it is not.

        A batch whose file is dropped is made again: with the same records, and perhaps more.
        """
        planned, done = self._batches(PLANNED), self._batches(DONE)
        had_batches = bool(planned or done)
        # Spark reads the last two.
        while planned and not all(self._is_whole(PLANNED, each) for each in planned[-2:]):
            self._drop(PLANNED, planned.pop())
        last = planned[-1] if planned else -1
        while done and not (done[-1] <= last and self._is_whole(DONE, done[-1])):
            self._drop(DONE, done.pop())
        if had_batches and not planned:
            return "none of its batches can be read"
        if planned and not _is_json(self._files.read(METADATA) or b""):
            return f"its {METADATA} cannot be read"
        for name in self._initial():
            if _offsets(self._files.read(name) or b"", 0) is None:
                if not planned:
                    return "where it began cannot be read"
                # It is of no use where there are batches.
                self._files.delete(name)
        if self._files.has_empty(STATE):
            return "what the query remembers cannot be read"
        return None

    def done(self) -> dict[Place, int]:
        """Return the offsets that its last committed batch ends with, or that it began with."""
        done = set(self._batches(DONE))
        batches = [each for each in self._batches(PLANNED) if each in done]
        if batches:
            return self._ends_of(batches[-1])
        began: dict[Place, int] = {}
        for name in self._initial():
            began |= _offsets(self._files.read(name) or b"", 0) or {}
        return began

    def planned(self) -> dict[Place, int]:
        """Return the offsets that its last batch ends with, committed or not."""
        batches = self._batches(PLANNED)
        return self._ends_of(batches[-1]) if batches else {}

    def _initial(self) -> list[str]:
        return [
            f"{SOURCES}/{each}/0"
            for each in self._files.names(SOURCES)
            if "0" in self._files.names(f"{SOURCES}/{each}")
        ]

    def _ends_of(self, batch: int) -> dict[Place, int]:
        return _offsets(self._files.read(f"{PLANNED}/{batch}") or b"", 1) or {}

    def _batches(self, folder: str) -> list[int]:
        return sorted(int(name) for name in self._files.names(folder) if name.isdecimal())

    def _is_whole(self, folder: str, batch: int) -> bool:
        data = self._files.read(f"{folder}/{batch}") or b""
        return (_offsets(data, 1) if folder == PLANNED else _lines(data)) is not None

    def _drop(self, folder: str, batch: int) -> None:
        log.error(
            "removed a torn checkpoint file: its batch runs again, without what was delivered "
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
            # The database's own log may be empty.
            if each.getLen() == 0 and not each.getPath().getName().endswith(".log"):
                return True
        return False

    def read(self, name: str) -> bytes | None:
        """Return the file's bytes: none of a torn one, None where there is no such file."""
        path = self._at(name)
        if not self._system.exists(path):
            return None
        try:
            stream = self._system.open(path)
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()
        except Py4JJavaError as error:
            if error.java_exception.getClass().getName() not in TORN:
                raise
            return b""

    def write(self, name: str, text: str) -> None:
        """Write the file, in place of what is there."""
        stream = self._system.create(self._at(name), True)
        try:
            stream.write(text.encode())
            stream.hsync()
        finally:
            stream.close()

    def delete(self, name: str) -> None:
        """Delete the file, or the folder with all that is in it; "" is the directory itself."""
        self._system.delete(self._at(name), True)

    def _at(self, name: str) -> Any:  # noqa: ANN401 (py4j's objects have no type)
        return self._path(self._root, name) if name else self._root


def _lines(data: bytes) -> list[Any] | None:
    """Return what one of Spark's log files says behind its version; None of a torn one."""
    # One of them begins with a zero byte.
    version, *lines = data.decode(errors="replace").lstrip("\0").splitlines() or [""]
    if not lines or not _VERSION.fullmatch(version.strip()):
        return None
    try:
        # A source that has not begun is a dash.
        return [None if line == "-" else json.loads(line) for line in lines]
    except ValueError:
        return None


def _offsets(data: bytes, skipped: int) -> dict[Place, int] | None:
    """Return the offsets in one of Spark's log files, of all its sources; None of a torn one.

    The lines before them are `skipped`.
    """
    sources = (_lines(data) or [])[skipped:]
    found: dict[Place, int] = {}
    for source in sources:
        try:
            found |= {
                (topic, int(each)): int(at)
                for topic, ends in (source or {}).items()
                for each, at in ends.items()
            }
        except (AttributeError, ValueError, TypeError):
            return None
    return found if sources else None


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except ValueError:
        return False
