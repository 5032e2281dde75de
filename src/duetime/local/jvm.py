"""Kafka's two programs, as Java runs them: one formats a directory, the other is the broker."""

import os
import subprocess

from duetime.local.jars import broker_jars
from duetime.local.java import find_java
from duetime.local.process import GuardedProcess
from duetime.local.startup import ClassArchive
from duetime.local.storage import BrokerDirectory

#: Java's own warnings go where last words are looked for, and its notes nowhere.
COMMON_OPTIONS = (
    "-Djava.awt.headless=true",
    "-Dlog4j2.configurationFile=log4j2.xml",
    "-Xlog:disable",
    "-Xlog:all=error:stderr",
)

BROKER_OPTIONS = (
    # Records do not stay in the heap; the page cache needs the memory more.
    "-Xms512m",
    "-Xmx1g",
    # At 15,000 messages/s an acknowledgement took 16 ms at most, against 40 with ParallelGC.
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    # A broker out of memory would hang: let it end, so that it is noticed.
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:ErrorFile=java-crash.log",
)

#: Formatting is over before a better compiler or collector would pay.
FORMAT_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")

#: Seconds; half of one is usual.
FORMAT_TIMEOUT = 120


class KafkaJava:
    """Runs Kafka in `directory`. Raises `SetupError` at once if Java or a jar is missing."""

    def __init__(self, directory: BrokerDirectory) -> None:
        self._java = find_java()
        # In the environment, because 46 paths would make every listing of processes unreadable.
        self._env = os.environ | {"CLASSPATH": os.pathsep.join(map(str, broker_jars()))}
        self._archive, self._draft = ClassArchive(self._java), directory.path / "classes.jsa"
        self._directory = directory

    def format(self, cluster_id: str) -> None:
        """Make the directory one of this cluster. Safe to repeat after a crash in the middle."""
        cluster = f"--cluster-id={cluster_id}"
        command = ["kafka.tools.StorageTool", "format", cluster, "-c", "server.properties"]
        options = (*FORMAT_OPTIONS, *self._archive.read_options())
        log_begins = self._directory.log_size()
        try:
            with self._directory.output.open("wb") as output:
                subprocess.run(
                    self._command(*options, *command),
                    cwd=self._directory.path,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=FORMAT_TIMEOUT,
                    check=True,
                )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise self._directory.failure(log_begins) from error

    def serve(self) -> GuardedProcess:
        """Start the broker; the caller ends it."""
        options = (*BROKER_OPTIONS, *self._archive.options(self._draft))
        return GuardedProcess.start(
            self._command(*options, "kafka.Kafka", "server.properties"),
            cwd=self._directory.path,
            env=self._env,
            output=self._directory.output,
        )

    def ended_well(self) -> None:
        """Keep what the broker left for the start of the next."""
        self._archive.keep(self._draft)

    def _command(self, *arguments: str) -> list[str]:
        return [str(self._java), *COMMON_OPTIONS, *arguments]
