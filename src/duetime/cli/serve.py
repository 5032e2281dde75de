"""up, run: the pipeline in the foreground, until a signal."""

import fcntl
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from duetime.admin import create_topics
from duetime.cli.beside import api_beside, warn_of_port
from duetime.cli.connect import connected
from duetime.cli.display import facts, home_relative, program
from duetime.cli.logs import logged
from duetime.cli.options import (
    BadInput,
    Config,
    Kafka,
    StartFrom,
    Store,
    Verbose,
    settings_from,
)
from duetime.cli.service import Service, interruptible
from duetime.config import EARLIEST, Settings, is_submitted
from duetime.errors import DuetimeError, Paused, SetupError
from duetime.local.broker import LocalBroker
from duetime.local.disk import data_home, require_directory
from duetime.local.jars import pipeline_jars
from duetime.local.java import find_java
from duetime.metrics import serve
from duetime.reach import require_intake, require_kafka
from duetime.stores.opening import check_store

log = logging.getLogger(__name__)

#: Kafka's usual port, where every client's examples look for it.
PORT = 9092


def up(  # noqa: PLR0913 (an option each)
    *,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="What is kept. [~/.local/share/duetime]"),
    ] = None,
    kafka: Annotated[
        str | None,
        typer.Option("--kafka", metavar="HOST:PORT", help="Your cluster, instead of an own Kafka."),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65_535, help=f"Of the own Kafka. [{PORT}]")
    ] = None,
    api_port: Annotated[
        int | None, typer.Option("--api-port", min=1, max=65_535, help="Of the HTTP API. [8080]")
    ] = None,
    store: Store = None,
    start_from: StartFrom = None,
    config: Config = None,
    verbose: Verbose = False,
) -> None:
    """Kafka, the pipeline and the HTTP API on this machine, until Ctrl-C.

    What waits is kept for the next time, in the data directory or in the cluster named by --kafka.
    The API is there where it is installed (duetime[api]) and its port is free.
    """
    if kafka and port:
        raise BadInput("--port is for an own Kafka, and --kafka names another: leave one")
    asked = settings_from(kafka, config, store=store, start_from=start_from)
    directory = (data or data_home()).expanduser().absolute()
    with (
        logged(logging.DEBUG if verbose else logging.INFO, asked.log_format),
        suppress(KeyboardInterrupt),
        interruptible(),
        _alone(directory),
    ):
        _look_ahead(_with_api_port(asked, api_port))
        if kafka:
            settings = connected(kafka, config, store, start_from)
            _up(_with_api_port(settings, api_port), directory, config)
        else:
            broker = LocalBroker(directory / "broker", port or PORT)
            # Nobody else has delivered what is in an own Kafka.
            begin = asked.start_from or EARLIEST
            with _started(broker, config, store, begin) as settings:
                look = partial(_require_running, broker, directory)
                _up(_with_api_port(settings, api_port), directory, config, look)


def run(
    *,
    kafka: Kafka = None,
    store: Store = None,
    start_from: StartFrom = None,
    config: Config = None,
    verbose: Verbose = False,
) -> None:
    """The pipeline alone, for production, against your cluster.

    Topics must exist (`duetime topics`), and the setting checkpoint says where offsets are kept.
    The first start refuses to read records that another service may have delivered: see --from.
    """
    settings = settings_from(kafka, config, store=store, start_from=start_from)
    level = logging.DEBUG if verbose else logging.INFO
    with logged(level, settings.log_format), suppress(KeyboardInterrupt), interruptible():
        require_intake(settings)
        try:
            _serve(settings, _connector(), lambda: _tell_ready(settings), fenced=True)
        except Paused as error:
            if is_submitted():
                raise
            log.warning("%s: starting again", error)
            # The same command in a new process image: nothing of this one may go on.
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def _look_ahead(settings: Settings) -> None:
    """What would only be found when Kafka and Spark have been started. Raises as `check_store`."""
    warn_of_port(settings)
    check_store(settings)


@contextmanager
def _started(
    broker: LocalBroker, config: Path | None, store: str | None, start_from: str
) -> Iterator[Settings]:
    log.info("starting Kafka")
    own = {"security_protocol": "PLAINTEXT", "store": store, "start_from": start_from}
    with broker:
        yield settings_from(broker.bootstrap, config, **own)


def _with_api_port(settings: Settings, port: int | None) -> Settings:
    return settings.model_copy(update={"api_port": port}) if port else settings


def _up(
    settings: Settings,
    directory: Path,
    config: Path | None,
    look: Callable[[], None] = lambda: None,
) -> None:
    created = create_topics(settings)
    if created:
        log.info("created topics=%d", len(created))
    # Offsets mean nothing on another cluster, or on this one made anew.
    cluster = str(require_kafka(settings).cluster_id)
    place = directory / "checkpoint" / cluster / settings.namespace
    kept = settings.model_copy(update={"checkpoint": f"file://{place}"})
    with api_beside(kept, directory, config) as api:
        _serve(kept, _connector(), lambda: _announce(kept, directory, api()), look)


def _serve(
    settings: Settings,
    jars: Sequence[Path],
    ready: Callable[[], None],
    look: Callable[[], None] = lambda: None,
    *,
    fenced: bool = False,
) -> None:
    """Run the pipeline until it fails or a signal interrupts. Raises Paused if it is `fenced`."""
    # Here and not above, because Spark takes a second to import, and most commands need none.
    from duetime.pipeline.runner import Pipeline  # noqa: PLC0415

    pipeline = Pipeline(settings, jars=jars, fenced=fenced)
    serve(settings)
    log.info("starting Spark")
    try:
        with Service(pipeline, look) as service:
            service.wait_until_ready()
            ready()
            service.wait()
    except DuetimeError as error:
        if pipeline.was_paused:
            raise Paused(
                "this process was paused for seconds, and what it held is left to another"
            ) from error
        raise


def _connector() -> list[Path]:
    """The jars that Spark has to be given: none where `spark-submit` started this program."""
    if is_submitted():
        return []
    find_java()
    return pipeline_jars()


def _tell_ready(settings: Settings) -> None:
    log.info("ready kafka=%s", settings.bootstrap)


def _announce(settings: Settings, directory: Path, api: str) -> None:
    host_port = settings.bootstrap
    there = "" if host_port == f"127.0.0.1:{PORT}" else f" --kafka {host_port}"
    lines = {
        "Kafka": host_port,
        "try it": f"{program()} send hello --in 5s --value 'Hello, later'{there}",
        "see it": f"{program()} pending{there}",
        "by HTTP": api,
        "data": home_relative(directory),
        "Ctrl-C": "stops it; what waits is kept",
    }
    typer.echo("duetime is ready")
    typer.echo(facts((f"  {name}", text) for name, text in lines.items()))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two pipelines over one checkpoint would deliver twice. Raises SetupError."""
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
            f"the own Kafka ended by itself ({directory / 'broker' / 'broker.log'} may say why): "
            "start it again; what waits is kept"
        )
