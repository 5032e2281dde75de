"""The HTTP API beside a pipeline: a process of its own, so that no request holds up a window."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from duetime.api.address import url
from duetime.cli.display import home_relative
from duetime.config import Settings
from duetime.errors import SetupError
from duetime.local.ports import require_free
from duetime.local.process import GuardedProcess

log = logging.getLogger(__name__)

#: What chooses its port here.
OPTION = "--api-port"


def warn_of_port(settings: Settings) -> None:
    """Say at once that there will be no API, where its port is in use: the rest takes a minute."""
    try:
        require_free(settings.api_port, OPTION)
    except SetupError as error:
        log.warning("no HTTP API beside it: %s", error)


@contextmanager
def api_beside(
    settings: Settings, directory: Path, config: Path | None
) -> Iterator[Callable[[], str]]:
    """The API while the block lasts. It gives what says where it is, or why there is none.

    The pipeline needs no API: without FastAPI, or where its port is in use, there is none.
    """
    output = directory / "api.log"
    command = [sys.executable, "-m", "duetime", "api", "--kafka", settings.bootstrap]
    if config:
        command += ["--config", str(config)]
    own = {
        "DUETIME_API_PORT": str(settings.api_port),
        "DUETIME_SECURITY_PROTOCOL": settings.security_protocol,
        "DUETIME_STORE": settings.store.get_secret_value(),
        # What is accepted is kept where all else is: another directory is another Kafka.
        "DUETIME_API_SPOOL": str(settings.api_spool or directory / "spool.db"),
    }
    # Its settings may be in a file of this directory.
    process = GuardedProcess.start(command, cwd=Path.cwd(), env=os.environ | own, output=output)
    try:
        yield lambda: f"{url(settings)}/" if process.running else _why_none(settings, output)
    finally:
        process.stop()


def _why_none(settings: Settings, output: Path) -> str:
    try:
        require_free(settings.api_port, OPTION)
    except SetupError as error:
        return f"none: {error}"
    last = output.read_text(errors="replace").strip().rpartition("\n")[2]
    why = last.removeprefix("error: ")
    return f"none: {why}" if why != last else f"none ({home_relative(output)} says why)"
