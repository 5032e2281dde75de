"""Java, the jars that PySpark does not ship (connector and local broker), and class archives.

`ivy.xml` names the jars. They are fetched once into a directory that carries the hash of that file,
so that another version of duetime never runs with this one's jars. `python -m duetime.local.jars`
fetches them ahead of time.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from duetime.core.errors import SetupError
from duetime.local.process import require_directory, require_room

IVY_XML = Path(__file__).with_name("ivy.xml")

#: The groups of jars in `ivy.xml`, and the directories that hold them.
CONFS = ("pipeline", "broker")

#: MiB: 56 of jars, twice for as long as Ivy keeps its own copy, and something to spare.
ROOM_MIB = 200

#: Timeout of the download, in seconds. A slow line takes minutes; a dead one should not take a day.
DOWNLOAD_TIMEOUT_S = 900

#: The oldest Java that Spark 4 and the Kafka 4 broker run on.
OLDEST_JAVA = 17

#: Java reports an archive that does not fit, and each class that it cannot archive.
QUIET = "-Xlog:cds=off,cds+dynamic=off"

ADVICE = f"install Java {OLDEST_JAVA} or newer, or set JAVA_HOME to where it is"


def jars_dir() -> Path:
    """Return the directory of the jars: `$DUETIME_JARS`, else one in the user's cache."""
    chosen = os.environ.get("DUETIME_JARS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    version = hashlib.sha256(IVY_XML.read_bytes()).hexdigest()[:12]
    return Path.home() / ".cache" / "duetime" / "jars" / version


def pipeline_jars() -> list[Path]:
    """Return the jars for Spark's class path. Raises `SetupError` as `ensure_jars` does."""
    return _jars("pipeline")


def broker_jars() -> list[Path]:
    """Return the jars for the broker's class path. Raises `SetupError` as `ensure_jars` does."""
    return _jars("broker")


def _jars(conf: str) -> list[Path]:
    ensure_jars()
    return sorted((jars_dir() / conf).glob("*.jar"))


def ensure_jars() -> None:
    """Fetch the jars if they are missing. Safe to repeat, and from two processes at once.

    A crash leaves either no jars or all of them: they come into place by one rename.
    Raises `SetupError` if Java, room on the disk or the download is missing.
    """
    target = jars_dir()
    if not missing_jars(target):
        return
    java = find_java()
    require_directory(target.parent)
    require_room(target, ROOM_MIB)
    # Two Ivys that write to one cache at once may leave a broken jar in it.
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if missing_jars(target):
            _fetch(java, target)


def missing_jars(directory: Path) -> list[str]:
    """Return the configurations of `ivy.xml` that have no jars in the directory."""
    return [conf for conf in CONFS if not any((directory / conf).glob("*.jar"))]


def _fetch(java: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetching-") as scratch:
        fetched = Path(scratch, "jars")
        fetched.mkdir()
        _retrieve(java, fetched, target.parent / "fetch.log")
        try:
            fetched.rename(target)
        except OSError as error:
            raise SetupError(
                f"{target} has files in it but not the jars: "
                "empty it, or set DUETIME_JARS to another directory"
            ) from error


def _retrieve(java: Path, directory: Path, log: Path) -> None:
    # A pattern without a directory: Ivy would take brackets in its path for its own.
    pattern = "[conf]/[artifact]-[revision].[ext]"
    what = ["-ivy", str(IVY_XML), "-confs", *CONFS, "-types", "jar", "bundle"]
    try:
        with log.open("wb") as output:
            subprocess.run(
                [java, "-jar", _ivy_jar(), *what, "-retrieve", pattern],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=DOWNLOAD_TIMEOUT_S,
                check=True,
            )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SetupError(
            f"the jars could not be downloaded (Ivy's words are in {log}): check the network and "
            "try again, or set DUETIME_JARS to a copy of another machine's jars"
        ) from error


def _ivy_jar() -> Path:
    """Return the Ivy that PySpark ships, found without importing PySpark."""
    pyspark = find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise SetupError("PySpark is not installed: run make setup, or pip install duetime again")
    return next(Path(pyspark.origin).parent.glob("jars/ivy-*.jar"))


def find_java() -> Path:
    """Return the `java` of JAVA_HOME, else of PATH, as Spark does.

    Raises `SetupError` if there is none, or if it is older than Java 17.
    """
    if home := os.environ.get("JAVA_HOME"):
        # A wrong JAVA_HOME is an error, and PATH is not tried: Spark would not try it either.
        java = Path(home).absolute() / "bin" / "java"
        if not os.access(java, os.X_OK):
            raise SetupError(f"JAVA_HOME is {java.parents[1]}, but there is no Java: {ADVICE}")
    elif found := shutil.which("java"):
        java = Path(found).absolute()
    else:
        raise SetupError(f"Java is missing: {ADVICE}")
    if (version := java_version(java)) < OLDEST_JAVA:
        raise SetupError(f"{java} is Java {version}, which is too old: {ADVICE}")
    return java


def java_version(java: Path) -> int:
    """Return the feature release of `java`: 17, 21, ... (Java 8 reports 1.8, and is 1 here)."""
    found = re.search(r'version "(\d+)', java_build(java))
    if found is None:
        raise SetupError(f"{java} prints no version, so it may be no Java at all: {ADVICE}")
    return int(found[1])


@cache
def java_build(java: Path) -> str:
    """Return all that `java -version` prints: it differs between any two builds."""
    try:
        return subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{java} does not run: {ADVICE}") from error


class ClassArchive:
    """The archive of the classes that `program` loads in `java`; a draft of it is written first.

    Java starts faster with it (class-data sharing). The first broker that is stopped writes its
    classes next to the jars (2 s longer, once, after its data are safe); those that start later map
    them: 0.9 s less, and half the CPU. For Spark, which would take 10 s for it when its user wants
    it to end, `make setup` writes an archive (`duetime.pipeline.class_archive`): a start takes 4 s
    less. Java ignores an archive that does not fit; each Java, installation and version of the
    program (`fits`) has an archive of another name.
    """

    def __init__(self, java: Path, program: str = "classes", fits: str = "") -> None:
        self._path = jars_dir() / f"{program}-{_digest(java_build(java) + fits)}.jsa"
        self._others = f"{program}-*.jsa"

    @property
    def exists(self) -> bool:
        """True if the archive is written."""
        return self._path.exists()

    def options(self, draft: Path) -> list[str]:
        """Return options of a Java that uses the archive, or else writes the draft when it ends."""
        # A draft that is still here was not finished.
        draft.unlink(missing_ok=True)
        return self.read_options() or self.write_options(draft)

    def read_options(self) -> list[str]:
        """Return options of a Java that uses the archive, if it exists."""
        return [f"-XX:SharedArchiveFile={self._path}", QUIET] if self.exists else []

    def write_options(self, draft: Path) -> list[str]:
        """Return options of a Java that writes the draft when it ends, where it can be kept."""
        writable = os.access(self._path.parent, os.W_OK)
        return [f"-XX:ArchiveClassesAtExit={draft}", QUIET] if writable else []

    def keep(self, draft: Path) -> None:
        """Move a finished draft into place. Safe to repeat, and without a draft."""
        if draft.exists():
            incoming = self._path.with_suffix(f".{os.getpid()}")
            shutil.move(draft, incoming)
            incoming.replace(self._path)

    def remove_others(self) -> None:
        """Remove the archives of this program that do not fit any more."""
        for each in self._path.parent.glob(self._others):
            if each != self._path:
                each.unlink()


def spark_archive() -> ClassArchive:
    """Return the archive for this installation of Spark. Raises SetupError without Java."""
    pyspark = find_spec("pyspark")
    place = Path(pyspark.origin or "").parent if pyspark else Path()
    # Java checks these, too: another release, or a repeated installation, has others.
    stats = sorted((jar.name, jar.stat()) for jar in place.glob("jars/*.jar"))
    fits = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return ClassArchive(find_java(), program=f"spark-{_digest(str(place))}", fits=fits)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main() -> int:
    """Fetch the jars and check Java, for `make setup`; silent if there is nothing to do."""
    try:
        find_java()
        if missing_jars(jars_dir()):
            print("fetching Kafka's and Spark's jars (56 MB) ...", flush=True)
            ensure_jars()
    except SetupError as error:
        print(f"duetime: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
