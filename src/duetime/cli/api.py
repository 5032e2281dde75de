"""api: the HTTP API in the foreground, until a signal."""

import logging
from contextlib import suppress
from typing import Annotated

import typer

from duetime.cli.logs import begin_log
from duetime.cli.options import Config, Kafka, Verbose, settings_from
from duetime.errors import KafkaError, SetupError
from duetime.reach import require_intake

log = logging.getLogger(__name__)

Port = Annotated[
    int | None, typer.Option("--port", min=1, max=65_535, help="Where it listens. [8080]")
]


def api(
    *, port: Port = None, kafka: Kafka = None, config: Config = None, verbose: Verbose = False
) -> None:
    """Messages by HTTP, until Ctrl-C.

    On this machine only, unless the configuration has tokens (api_host, api_tokens).
    """
    settings = settings_from(kafka, config, api_port=port)
    begin_log(logging.DEBUG if verbose else logging.INFO, settings.log_format)
    try:
        # Here and not above: FastAPI is an extra, and takes a while to import.
        from duetime.api.serve import check, check_spool, serve  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SetupError(f"{error.name} is missing: pip install 'duetime[api]'") from error
    check(settings)
    try:
        check_spool(settings, str(require_intake(settings).cluster_id))
    except KafkaError as error:
        log.warning("%s; until then, messages go into the spool", error)
    with suppress(KeyboardInterrupt):
        serve(settings)
