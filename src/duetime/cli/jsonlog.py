"""The log for programs: a JSON object a line, by structlog, of whatever logs in the usual way.

```
log.warning("rescued messages=%d slots=%d", 3, 1)
{"event": "rescued", "level": "warning", "logger": "...", "timestamp": "...", "messages": 3, ...}
```
"""

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial

import structlog
from structlog.typing import EventDict

#: Words of a log call that stand for an argument: `name=%s`, or `%s` alone; `%s/%d` is one value.
WORD = re.compile(r"%%|(?:(\w+)=)?((?:%[-+ #0-9.]*[a-zA-Z]/?)+)")

#: One of the conversions in such a word.
CONVERSION = re.compile(r"%[-+ #0-9.]*[a-zA-Z]")


def json_formatter(told: Callable[[logging.LogRecord], str | None]) -> logging.Formatter:
    """What makes a line of a record; `told` is how its exception is told."""
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            partial(_with_exception, told),
            _with_fields,
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(),
        ],
        pass_foreign_args=True,
    )


def _with_exception(
    told: Callable[[logging.LogRecord], str | None], _: object, __: str, event: EventDict
) -> EventDict:
    if event.pop("exc_info", None) and (words := told(event["_record"])):
        event["exception"] = words
    return event


def _with_fields(_: object, __: str, event: EventDict) -> EventDict:
    """Arguments that the phrase names become fields; the event is what is left of it."""
    phrase, given = str(event["_record"].msg), event.pop("positional_args")
    if isinstance(given, tuple) and len(CONVERSION.findall(phrase.replace("%%", ""))) == len(given):
        values = iter(given)
        left = WORD.sub(lambda word: _left(word, values, event), phrase)
        # What stood around the words that are gone.
        event["event"] = re.sub(r"\s+(?=[:;,])", "", " ".join(left.split()))
    return event


def _left(word: re.Match[str], values: Iterator[object], event: EventDict) -> str:
    """What stays in the phrase in place of the word."""
    if word[0] == "%%":
        return "%"
    name, form = word[1], word[2]
    given = tuple(next(values) for _ in CONVERSION.findall(form))
    if name is None:
        return form % given
    is_number = len(given) == 1 and isinstance(given[0], int | float)
    # `level` is how bad it is, and may be a slot's, too.
    event[f"{name}_" if name in event else name] = given[0] if is_number else form % given
    return ""
