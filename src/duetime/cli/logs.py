"""What `up`, `run` and `api` say about their work: a line a thing, on stderr."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from duetime.config import LogFormat
from duetime.wording import escaped

LINE = "%(asctime)s %(levelname)s %(message)s"

TIME = "%H:%M:%S"


class Escaped(logging.Formatter):
    """A message is one line, whatever an id or a name in it has: a stranger may have chosen it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's own name)
        """The line, without what an exception adds."""
        return escaped(super().formatMessage(record))


class OneLine(Escaped):
    """A record is one line; of an exception it has the name and the first line."""

    def formatException(self, ei: Sequence[object]) -> str:  # noqa: N802 (logging's own name)
        """The exception, as the end of the line."""
        error = ei[1]
        try:
            first_line = (str(error).strip().splitlines() or [""])[0]
        except Exception:  # noqa: BLE001 (an error of Java's asks the JVM, which may have ended)
            first_line = ""
        return f"{type(error).__name__}: {escaped(first_line)}"

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return super().format(record).replace("\n", " ")


class Lines(logging.StreamHandler[TextIO]):
    """Where the lines go, told apart from others' handlers."""


def begin_log(level: int, form: LogFormat = "text") -> None:
    """Log duetime's work to stderr, a line each; at DEBUG with the traces of errors."""
    handler = Lines(sys.stderr)
    handler.setFormatter(_formatter(level, form))
    # py4j tells of every call that was under way when Spark ended.
    handler.addFilter(lambda record: not record.name.startswith("py4j"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("duetime").setLevel(level)


def end_log() -> None:
    """Say nothing more: what threads say that are just ending would hide why they do."""
    for each in logging.getLogger().handlers:
        if isinstance(each, Lines):
            each.setLevel(logging.CRITICAL + 1)


@contextmanager
def logged(level: int, form: LogFormat) -> Iterator[None]:
    """A log while the block lasts, and no longer: the reason for its end is said last."""
    begin_log(level, form)
    try:
        yield
    finally:
        end_log()


def _formatter(level: int, form: LogFormat) -> logging.Formatter:
    kind = Escaped if level == logging.DEBUG else OneLine
    text = kind(LINE, TIME)
    if form == "text":
        return text
    # Here and not above: structlog takes a while to import.
    from duetime.cli.jsonlog import json_formatter  # noqa: PLC0415

    return json_formatter(
        lambda record: text.formatException(record.exc_info) if record.exc_info else None
    )
