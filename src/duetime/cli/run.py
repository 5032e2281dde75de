"""up, run, api: the pipeline or the HTTP API in the foreground, until a signal.

The pipeline runs in a thread, so that a signal never interrupts a call to the JVM. The main thread
only waits, and a signal interrupts nothing else:

```
first signal            the pipeline stops: windows end, pending messages stay
6 seconds after it      Spark is killed (3 if it was still starting): as after a crash, nothing is
                        lost
second signal           this process ends at once, and with it Spark and the local broker
```
"""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Self

import typer
from typer import Option

from duetime.cli.logs import begin_log, end_log, logged
from duetime.cli.terminal import (
    BadInput,
    Config,
    Kafka,
    StartFrom,
    Store,
    Text,
    Verbose,
    facts,
    home_relative,
    port_option,
    program,
    settings_from,
)
from duetime.core.errors import (
    DuetimeError,
    KafkaError,
    LeaderPaused,
    LeaderStuck,
    SetupError,
    error_text,
)
from duetime.core.metrics import serve
from duetime.core.settings import EARLIEST, Settings, is_submitted
from duetime.kafka.admin import await_kafka, create_topics
from duetime.kafka.connection import ensure_intake_topics, ensure_reachable
from duetime.local.broker import LocalBroker
from duetime.local.jars import find_java, pipeline_jars
from duetime.local.process import GuardedProcess, data_home, require_directory, require_free
from duetime.stores.factory import check_store

if TYPE_CHECKING:
    from duetime.pipeline.service import Pipeline

# ruff: noqa: PLC0415 (Spark and FastAPI take a second to import, and most commands need neither)

log = logging.getLogger(__name__)

#: Kafka's usual port, which the examples of every client use.
PORT = 9092

#: Option for the port of the API that runs with the pipeline.
API_PORT_OPTION = "--api-port"

#: Time for the pipeline to stop, in seconds: on a busy machine the broker needs time as well, and
#: all of it is over in 10. Less while it is starting, as no work would be lost.
STOP_TIMEOUT_S = 6.0
STOP_STARTING_TIMEOUT_S = 3.0

#: Interval of the checks while the main thread waits, in seconds.
CHECK_INTERVAL_S = 0.5

#: Exit code of a program that Ctrl-C ended.
INTERRUPTED = 130

#: The first is ignored in a background process, and may be sent to it nevertheless.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def up(  # noqa: PLR0913 (an option each)
    *,
    data: Annotated[
        Path | None, Option("--data", metavar="DIR", help="Data. [~/.local/share/duetime]")
    ] = None,
    kafka: Annotated[
        Text, Option("--kafka", metavar="HOST:PORT", help="Cluster, in place of a local Kafka.")
    ] = None,
    port: Annotated[int | None, port_option("--port", f"Of the local Kafka. [{PORT}]")] = None,
    api_port: Annotated[int | None, port_option(API_PORT_OPTION, "Of the API. [8080]")] = None,
    store: Store = None,
    start_from: StartFrom = None,
    config: Config = None,
    verbose: Verbose = False,
) -> None:
    """Run Kafka, the pipeline and the HTTP API.

    All of them run on this machine, until Ctrl-C. Pending messages are kept in the data directory,
    or in the cluster of --kafka. The API runs if it is installed (duetime[api]) and its port is
    free.
    """
    if kafka and port:
        raise BadInput("--port is for a local Kafka, and --kafka names another: omit one")
    overrides = {"store": store, "start_from": start_from, "api_port": api_port}
    settings = settings_from(kafka, config, **overrides)
    directory = (data or data_home()).expanduser().absolute()
    with (
        logged(logging.DEBUG if verbose else logging.INFO, settings.log_format),
        suppress(KeyboardInterrupt),
        interruptible(),
        _locked(directory),
    ):
        # Fail now: starting Kafka and Spark takes a minute.
        try:
            require_free(settings.api_port, API_PORT_OPTION)
        except SetupError as error:
            log.warning("cannot start the HTTP API: %s", error)
        check_store(settings)
        if kafka:
            _up(settings, directory, config)
            return
        log.info("starting Kafka")
        # Nothing but duetime has delivered the records of a local Kafka.
        overrides |= {
            "security_protocol": "PLAINTEXT",
            "start_from": settings.start_from or EARLIEST,
        }
        with LocalBroker(directory / "broker", port or PORT) as broker:
            settings = settings_from(broker.bootstrap, config, **overrides)
            _up(settings, directory, config, partial(_require_running, broker, directory))


def run(  # noqa: PLR0913 (an option each)
    *,
    kafka: Kafka = None,
    store: Store = None,
    start_from: StartFrom = None,
    master: Annotated[
        Text, Option("--master", metavar="URL", help="Spark cluster. [this process]")
    ] = None,
    config: Config = None,
    verbose: Verbose = False,
) -> None:
    """Run only the pipeline, for production.

    It runs against your cluster, until a signal. Topics must exist (`duetime topics`), and the
    setting checkpoint says where offsets are kept. The first start refuses to read records that
    another service may have delivered: see --from.
    """
    overrides = {"store": store, "start_from": start_from, "spark_master": master}
    settings = settings_from(kafka, config, **overrides)
    level = logging.DEBUG if verbose else logging.INFO
    with logged(level, settings.log_format), suppress(KeyboardInterrupt), interruptible():
        ensure_intake_topics(settings)
        try:
            _run_pipeline(
                settings, lambda: log.info("ready kafka=%s", settings.bootstrap), is_fenced=True
            )
        except (LeaderPaused, LeaderStuck) as error:
            if is_submitted():
                raise
            log.warning("%s: restarting", error)
            await_kafka(settings)
            # The same command in a new process image: nothing of this one may go on.
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def api(
    *,
    port: Annotated[int | None, port_option("--port", "Port of the HTTP API. [8080]")] = None,
    kafka: Kafka = None,
    config: Config = None,
    verbose: Verbose = False,
) -> None:
    """Run only the HTTP API, until Ctrl-C.

    It listens on this machine only, unless tokens are configured (api_host, api_tokens).
    """
    settings = settings_from(kafka, config, api_port=port)
    begin_log(logging.DEBUG if verbose else logging.INFO, settings.log_format)
    try:
        from duetime.api import server
    except ModuleNotFoundError as error:
        raise SetupError(f"{error.name} is missing: pip install 'duetime[api]'") from error
    server.check(settings)
    try:
        server.check_spool(settings, str(ensure_intake_topics(settings).cluster_id))
    except KafkaError as error:
        log.warning("%s; until then, messages go into the spool", error)
    with suppress(KeyboardInterrupt):
        server.serve(settings)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the data directory: two pipelines on one checkpoint would deliver twice.

    Raises SetupError.
    """
    require_directory(directory)
    with (directory / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SetupError(
                f"another duetime up works on {directory}: stop it, or choose another with --data"
            ) from error
        yield


def _require_running(broker: LocalBroker, directory: Path) -> None:
    if not broker.running:
        raise SetupError(
            f"the local Kafka ended ({directory / 'broker' / 'broker.log'} may say why): "
            "start it again; pending messages are kept"
        )


def _up(
    settings: Settings,
    directory: Path,
    config: Path | None,
    check: Callable[[], None] = lambda: None,
) -> None:
    # Offsets mean nothing on another cluster, or on a new one at the same address.
    cluster = str(ensure_reachable(settings).cluster_id)
    created = create_topics(settings)
    if created:
        log.info("created topics=%d", len(created))
    checkpoint = directory / "checkpoint" / cluster / settings.namespace
    settings = settings.model_copy(update={"checkpoint": f"file://{checkpoint}"})
    with api_process(settings, directory, config) as api_state:
        _run_pipeline(settings, lambda: _announce(settings, directory, api_state()), check)


def _announce(settings: Settings, directory: Path, api_state: str) -> None:
    bootstrap = settings.bootstrap
    option = "" if bootstrap == f"127.0.0.1:{PORT}" else f" --kafka {bootstrap}"
    lines = {
        "Kafka": bootstrap,
        "try it": f"{program()} send hello --in 5s --value 'Hello, later'{option}",
        "see it": f"{program()} pending{option}",
        "by HTTP": api_state,
        "data": home_relative(directory),
        "Ctrl-C": "stops it; pending messages are kept",
    }
    typer.echo("duetime is ready")
    typer.echo(facts((f"  {name}", text) for name, text in lines.items()))


@contextmanager
def api_process(
    settings: Settings, directory: Path, config: Path | None
) -> Iterator[Callable[[], str]]:
    """Run the API in a process while the block lasts: no request delays the pipeline.

    Yields a function that returns its URL, or why it does not run: the pipeline needs no API.
    """
    output = directory / "api.log"
    command = [sys.executable, "-m", "duetime", "api", "--kafka", settings.bootstrap]
    if config:
        command += ["--config", str(config)]
    environment = os.environ | {
        "DUETIME_API_PORT": str(settings.api_port),
        "DUETIME_SECURITY_PROTOCOL": settings.security_protocol,
        "DUETIME_STORE": settings.store.get_secret_value(),
        # The spool belongs to the Kafka of this directory.
        "DUETIME_API_SPOOL": str(settings.api_spool or directory / "spool.db"),
    }
    # Its settings may be in a file of the working directory.
    process = GuardedProcess.start(command, cwd=Path.cwd(), env=environment, output=output)

    def state() -> str:
        if process.running:
            return f"{settings.api_url}/"
        try:
            require_free(settings.api_port, API_PORT_OPTION)
        except SetupError as error:
            return f"none: {error}"
        last = output.read_text(errors="replace").strip().rpartition("\n")[2]
        if last.startswith("error: "):
            return f"none: {last.removeprefix('error: ')}"
        return f"none ({home_relative(output)} says why)"

    try:
        yield state
    finally:
        process.stop()


def _run_pipeline(
    settings: Settings,
    on_ready: Callable[[], None],
    check: Callable[[], None] = lambda: None,
    *,
    is_fenced: bool = False,
) -> None:
    """Run the pipeline until it fails or a signal comes.

    Raises LeaderPaused if `is_fenced`, and LeaderStuck.
    """
    from duetime.pipeline.service import Pipeline

    jars: list[Path] = []
    if not is_submitted():
        find_java()
        jars = pipeline_jars()
    pipeline = Pipeline(settings, jars=jars, fenced=is_fenced)
    serve(settings)
    log.info("starting Spark")
    try:
        with PipelineThread(pipeline, check) as thread:
            thread.wait_until_ready()
            on_ready()
            thread.wait()
    except DuetimeError as error:
        if pipeline.has_watchdog_fired:
            raise LeaderPaused(
                "no heartbeat for seconds (this process stood still, or reached no broker), and "
                "another may have taken over its work"
            ) from error
        raise


class PipelineThread:
    """Runs a pipeline in a thread while the block lasts; its end stops the pipeline and its JVM.

    `check` is called every CHECK_INTERVAL_S while the main thread waits, and may raise.
    """

    def __init__(self, pipeline: "Pipeline", check: Callable[[], None] = lambda: None) -> None:
        self._pipeline = pipeline
        self._check = check
        self._ready = threading.Event()
        # `Thread.join` is no alternative: after a signal it takes a running thread for ended
        # (CPython 3.11, bpo-45274).
        self._ended = threading.Event()
        self._failure: DuetimeError | None = None
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)

    def wait_until_ready(self) -> None:
        """Wait for the end of the warm-up. Raises the error of the pipeline."""
        self._wait_for(self._ready)

    def wait(self) -> None:
        """Wait until the pipeline ends without a signal, which is a failure, and raise that."""
        self._wait_for(self._ended)

    def _wait_for(self, event: threading.Event) -> None:
        while not event.wait(CHECK_INTERVAL_S):
            self._check()
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        try:
            self._pipeline.start()
            self._ready.set()
            with ExitStack() as stopping:
                stopping.callback(self._pipeline.stop)
                try:
                    self._pipeline.watch()
                except LeaderStuck:
                    # What does not deliver may not stop either: it ends as by a crash.
                    stopping.pop_all()
                    raise
        except DuetimeError as error:
            self._failure = error
        except Exception as error:
            log.debug("pipeline failed", exc_info=True)
            # In words now, while the JVM that knows them runs.
            self._failure = DuetimeError(
                f"the pipeline failed ({error_text(error)}): run it with --verbose to see where"
            )
        finally:
            self._ready.set()
            self._ended.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        is_cause = isinstance(error, DuetimeError) and error is not self._failure
        if not self._ready.is_set() or is_cause:
            # What the pipeline logs from now on are consequences.
            end_log()
        timeout_s = STOP_TIMEOUT_S if self._ready.is_set() else STOP_STARTING_TIMEOUT_S
        self._pipeline.ask_to_stop()
        if not self._ended.wait(timeout_s):
            log.warning(
                "killing Spark, as it did not stop; nothing is lost seconds=%.0f", timeout_s
            )
        elif self._failure and self._failure is not error:
            log.warning("pipeline stopped with an error: %s", self._failure, exc_info=self._failure)
        end_spark(kill=not self._ended.is_set())


def end_spark(*, kill: bool = False) -> None:
    """End the JVM that PySpark started, if any; this process cannot start another one then."""
    # Spark is imported already, or there is nothing to end.
    from pyspark import SparkContext

    process: subprocess.Popen[bytes] | None = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 (PySpark has no public name for it)
    if process is None:
        return
    if process.stdin and not kill:
        # It ends with this pipe.
        process.stdin.close()
    try:
        process.wait(0 if kill else 1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and a closed terminal interrupt like Ctrl-C; a second signal ends the process."""
    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            # The JVM and the broker's watchdog read pipes that break now, and end.
            os._exit(INTERRUPTED)
        interrupted = True
        raise KeyboardInterrupt

    # `nohup` ignores SIGHUP on purpose.
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = SIGNALS if is_ignored else (*SIGNALS, signal.SIGHUP)
    before = {each: signal.signal(each, interrupt) for each in handled}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
