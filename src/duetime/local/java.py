"""The Java that runs Kafka and Spark."""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from duetime.errors import SetupError

#: The oldest Java that Spark 4 and the Kafka 4 broker run on.
OLDEST_JAVA = 17

ADVICE = f"install Java {OLDEST_JAVA} or newer, or set JAVA_HOME to where it is"


def find_java() -> Path:
    """The `java` of JAVA_HOME, else of PATH: as Spark looks for it.

    Raises `SetupError` if there is none, or if it is older than Java 17.
    """
    java = _candidate()
    if java is None:
        raise SetupError(f"Java is missing: {ADVICE}")
    version = java_version(java)
    if version < OLDEST_JAVA:
        raise SetupError(f"{java} is Java {version}, which is too old: {ADVICE}")
    return java


def java_version(java: Path) -> int:
    """The feature release of `java`: 17, 21, ... (Java 8 calls itself 1.8, and is 1 here)."""
    found = re.search(r'version "(\d+)', java_build(java))
    if found is None:
        raise SetupError(f"{java} does not tell its version, so it may be no Java at all: {ADVICE}")
    return int(found[1])


@cache
def java_build(java: Path) -> str:
    """All that `java` tells about its version: no two builds tell the same."""
    try:
        return subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{java} does not run: {ADVICE}") from error


def _candidate() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    if home:
        # A wrong JAVA_HOME is told rather than passed over: Spark would not pass over it either.
        return _in_home(Path(home).absolute())
    found = shutil.which("java")
    return Path(found).absolute() if found else None


def _in_home(home: Path) -> Path:
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        raise SetupError(f"JAVA_HOME is {home}, but there is no Java: {ADVICE}")
    return java
