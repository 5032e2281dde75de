"""A faster start: Java keeps the classes that it has read and checked once.

The first broker that is stopped writes them to an archive next to the jars (2 s longer, once, after
its data are safe); those that start later map it: 0.9 s less, and half the CPU. For Spark, which
would take 10 s for it when its user wants it to end, `make setup` writes one
(`duetime.pipeline.training`): a start takes 4 s less. Java ignores an archive that does not fit it,
and one that another Java or another installation wrote has another name.
"""

import hashlib
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from duetime.local.jars import jars_dir
from duetime.local.java import find_java, java_build

#: Java tells of an archive that does not fit, and of each class that it cannot archive.
QUIET = "-Xlog:cds=off,cds+dynamic=off"


class ClassArchive:
    """The archive of what `program` loads in `java`; who writes one writes a draft of it first.

    `fits` tells apart what a program loads at different times.
    """

    def __init__(self, java: Path, program: str = "classes", fits: str = "") -> None:
        self._path = jars_dir() / f"{program}-{_digest(java_build(java) + fits)}.jsa"
        self._others = f"{program}-*.jsa"

    @property
    def exists(self) -> bool:
        """Whether there is one."""
        return self._path.exists()

    def read_options(self) -> list[str]:
        """Options of a Java that uses the archive, if there is one."""
        return [f"-XX:SharedArchiveFile={self._path}", QUIET] if self.exists else []

    def options(self, draft: Path) -> list[str]:
        """Options of a Java that uses the archive, or else writes the draft when it ends."""
        # A draft that is still here was not finished.
        draft.unlink(missing_ok=True)
        return self.read_options() or self.write_options(draft)

    def keep(self, draft: Path) -> None:
        """Put a finished draft in place. Safe to repeat; does nothing where none was written."""
        if draft.exists():
            incoming = self._path.with_suffix(f".{os.getpid()}")
            shutil.move(draft, incoming)
            incoming.replace(self._path)

    def write_options(self, draft: Path) -> list[str]:
        """Options of a Java that writes the draft when it ends, where that can be kept."""
        writable = os.access(self._path.parent, os.W_OK)
        return [f"-XX:ArchiveClassesAtExit={draft}", QUIET] if writable else []

    def remove_others(self) -> None:
        """Remove those of this program that fit no more."""
        for each in self._path.parent.glob(self._others):
            if each != self._path:
                each.unlink()


def spark_archive() -> ClassArchive:
    """That of Spark, as this installation has it. Raises SetupError where there is no Java."""
    pyspark = find_spec("pyspark")
    place = Path(pyspark.origin or "").parent if pyspark else Path()
    # Java looks at these, too: another release, and one that is installed anew, has others.
    stats = sorted((jar.name, jar.stat()) for jar in place.glob("jars/*.jar"))
    fits = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return ClassArchive(find_java(), program=f"spark-{_digest(str(place))}", fits=fits)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
