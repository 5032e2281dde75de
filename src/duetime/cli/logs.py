"""The log of `up`, `run` and `api` on stderr: a line of text or a JSON object for each event."""

import logging
import re
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO

from duetime.core.errors import escaped
from duetime.core.settings import LogFormat

LINE = "%(asctime)s %(levelname)s %(message)s"

TIME = "%H:%M:%S"

#: A part of a log call that stands for a value: `name=%s`, `%s`, or `%s/%d`.
FIELD = re.compile(r"%%|(?:(\w+)=)?((?:%[-+ #0-9.]*[a-zA-Z]/?)+)")

#: One of the conversions of a field.
CONVERSION = re.compile(r"%[-+ #0-9.]*[a-zA-Z]")


@contextmanager
def logged(level: int, form: LogFormat) -> Iterator[None]:
    """Log while the block lasts: the reason for its end is the last thing on stderr."""
    begin_log(level, form)
    try:
        yield
    finally:
        end_log()


def begin_log(level: int, form: LogFormat = "text") -> None:
    """Log duetime's work to stderr; at DEBUG with stack traces."""
    handler = DuetimeHandler(sys.stderr)
    handler.setFormatter(_formatter(level, form))
    # py4j logs every call that was running when Spark ended.
    handler.addFilter(lambda record: not record.name.startswith("py4j"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("duetime").setLevel(level)


def end_log() -> None:
    """Stop logging: what ending threads log would hide why they end."""
    for each in logging.getLogger().handlers:
        if isinstance(each, DuetimeHandler):
            each.setLevel(logging.CRITICAL + 1)


class DuetimeHandler(logging.StreamHandler[TextIO]):
    """The handler of `begin_log`, distinguishable from those of libraries."""


class EscapingFormatter(logging.Formatter):
    """Makes a message one line: ids and names in it may be chosen by an attacker."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the line, without an exception."""
        return escaped(super().formatMessage(record))


class OneLineFormatter(EscapingFormatter):
    """Makes a record one line, with the name and the first line of its exception."""

    def formatException(self, ei: Sequence[object]) -> str:  # noqa: N802 (logging's name)
        """Return the exception, as the end of the line."""
        error = ei[1]
        try:
            first_line = (str(error).strip().splitlines() or [""])[0]
        except Exception:  # noqa: BLE001 (an error of Java asks the JVM, which may have ended)
            first_line = ""
        return f"{type(error).__name__}: {escaped(first_line)}"

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return super().format(record).replace("\n", " ")


def _formatter(level: int, form: LogFormat) -> logging.Formatter:
    text = (EscapingFormatter if level == logging.DEBUG else OneLineFormatter)(LINE, TIME)
    return text if form == "text" else _json_formatter(text)


def _json_formatter(text: logging.Formatter) -> logging.Formatter:
    """Return a formatter of JSON objects; exceptions in them are as in the text.

    ```
    log.warning("released overdue messages=%d slots=%d", 3, 1)
    {"event": "released overdue", "level": "warning", ..., "messages": 3, "slots": 1}
    ```
    """
    import structlog  # noqa: PLC0415 (takes a while to import)

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            partial(_add_fields, text),
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(),
        ],
        pass_foreign_args=True,
    )


def _add_fields(
    text: logging.Formatter, _: object, __: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Turn the named arguments of a log call into fields; the event is the rest of its phrase."""
    record, arguments = event["_record"], event.pop("positional_args")
    if event.pop("exc_info", None) and record.exc_info:
        event["exception"] = text.formatException(record.exc_info)
    phrase = str(record.msg)
    conversions = CONVERSION.findall(phrase.replace("%%", ""))
    if isinstance(arguments, tuple) and len(conversions) == len(arguments):
        values = iter(arguments)
        rest = FIELD.sub(lambda field: _take_field(field, values, event), phrase)
        # The space in front of what followed a field.
        event["event"] = re.sub(r"\s+(?=[:;,])", "", " ".join(rest.split()))
    return event


def _take_field(
    field: re.Match[str], values: Iterator[object], event: MutableMapping[str, Any]
) -> str:
    """Add the field to the event if it has a name; return what stays in the phrase."""
    if field[0] == "%%":
        return "%"
    name, form = field[1], field[2]
    given = tuple(next(values) for _ in CONVERSION.findall(form))
    if name is None:
        return form % given
    is_number = len(given) == 1 and isinstance(given[0], int | float)
    # `level` is the severity, and may be the level of a slot as well.
    event[f"{name}_" if name in event else name] = given[0] if is_number else form % given
    return ""
