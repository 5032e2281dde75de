"""The jars that PySpark does not ship: Spark's Kafka connector, and the local broker.

`ivy.xml` names them. They are fetched once into a directory that carries the hash of that file, so
that another version of duetime never runs with this one's jars. `python -m duetime.local.jars`
fetches them ahead of time.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from duetime.errors import SetupError
from duetime.local.disk import require_directory, require_room
from duetime.local.java import find_java

IVY_XML = Path(__file__).with_name("ivy.xml")

#: The groups of jars in `ivy.xml`, and the directories that hold them.
CONFS = ("pipeline", "broker")

#: MiB: 56 of jars, twice for as long as Ivy keeps its own copy, and something to spare.
ROOM_MIB = 200

#: Seconds. A slow line takes minutes; a dead one should not take the day.
DOWNLOAD_TIMEOUT = 900


def jars_dir() -> Path:
    """Where the jars are, or will be: `$DUETIME_JARS`, else a directory in the user's cache."""
    chosen = os.environ.get("DUETIME_JARS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    version = hashlib.sha256(IVY_XML.read_bytes()).hexdigest()[:12]
    return Path.home() / ".cache" / "duetime" / "jars" / version


def pipeline_jars() -> list[Path]:
    """The jars for Spark's class path. Raises `SetupError` as `ensure_jars` does."""
    return _jars("pipeline")


def broker_jars() -> list[Path]:
    """The jars for the local broker's class path. Raises `SetupError` as `ensure_jars` does."""
    return _jars("broker")


def ensure_jars() -> None:
    """Fetch the jars if they are not here. Safe to repeat, and to call from two processes at once.

    A crash leaves either no jars or all of them: they come into place by one rename.
    Raises `SetupError` if Java, room on the disk or the download is missing.
    """
    target = jars_dir()
    if _complete(target):
        return
    java = find_java()
    require_directory(target.parent)
    require_room(target, ROOM_MIB)
    with _alone(target.parent):
        if not _complete(target):
            _fetch(java, target)


def _jars(conf: str) -> list[Path]:
    ensure_jars()
    return sorted((jars_dir() / conf).glob("*.jar"))


def _complete(directory: Path) -> bool:
    return all(any((directory / conf).glob("*.jar")) for conf in CONFS)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    # Two Ivys that write to one cache at once may leave a broken jar in it.
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(java: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetching-") as scratch:
        fetched = Path(scratch, "jars")
        fetched.mkdir()
        _retrieve(java, fetched, target.parent / "fetch.log")
        _put_in_place(fetched, target)


def _retrieve(java: Path, directory: Path, log: Path) -> None:
    try:
        with log.open("wb") as output:
            subprocess.run(
                _ivy_command(java),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=DOWNLOAD_TIMEOUT,
                check=True,
            )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SetupError(
            f"the jars could not be downloaded (Ivy's words are in {log}): check the network and "
            "try again, or set DUETIME_JARS to a copy of another machine's jars"
        ) from error


def _ivy_command(java: Path) -> list[str | Path]:
    # A pattern without a directory: Ivy would take brackets in its path for its own.
    pattern = "[conf]/[artifact]-[revision].[ext]"
    what = ["-ivy", str(IVY_XML), "-confs", *CONFS, "-types", "jar", "bundle"]
    return [java, "-jar", _ivy_jar(), *what, "-retrieve", pattern]


def _ivy_jar() -> Path:
    """The Ivy that PySpark ships, found without importing PySpark."""
    pyspark = find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise SetupError("PySpark is not installed: run make setup, or pip install duetime again")
    return next(Path(pyspark.origin).parent.glob("jars/ivy-*.jar"))


def _put_in_place(fetched: Path, target: Path) -> None:
    try:
        fetched.rename(target)
    except OSError as error:
        raise SetupError(
            f"{target} has files in it but not the jars: "
            "empty it, or set DUETIME_JARS to another directory"
        ) from error


def main() -> int:
    """Fetch the jars and check Java, for `make setup`. Says nothing when there is nothing to do."""
    try:
        find_java()
        if not _complete(jars_dir()):
            print("fetching Kafka's and Spark's jars (56 MB) ...", flush=True)
            ensure_jars()
    except SetupError as error:
        print(f"duetime: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
