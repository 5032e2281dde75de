"""The terminal: options of several commands, the settings that result, and text for people.

Everything that comes out of a message goes through `printable`: its sender must not be able to
steer the terminal.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from duetime.client.dead_letters import DeadLetter
from duetime.core.clock import format_duration, format_instant, parse_instant
from duetime.core.errors import ConfigError, escaped
from duetime.core.messages import PendingMessage
from duetime.core.settings import Settings, is_file, load_settings
from duetime.kafka.connection import ensure_reachable

#: An option that may be omitted.
Text = str | None

Kafka = Annotated[Text, Option("--kafka", metavar="HOST:PORT", help="Kafka's bootstrap servers.")]
Config = Annotated[
    Path | None, Option("--config", metavar="FILE", help="Settings, in place of duetime.toml.")
]
Store = Annotated[
    Text,
    Option("--store", metavar="URL", help="Pending messages: kafka, redis:// or aerospike://."),
]
StartFrom = Annotated[
    Text,
    Option(
        "--from",
        metavar="WHERE",
        help="Where the first start reads intake topics from: earliest, latest, a time such as "
        "2026-12-24T18:00:00Z, or a consumer group whose offsets are taken over.",
    ),
]
Id = Annotated[str, Argument(metavar="ID", help="Full id, as `duetime send` printed it.")]
In = Annotated[
    Text, Option("--in", metavar="DURATION", help="Delay from now: 250ms, 5s, 1h30m, 7d.")
]
At = Annotated[
    Text, Option("--at", metavar="TIME", help="Due time with a zone: 2026-12-24T18:00:00+01:00.")
]
OnlyValue = Annotated[bool, Option("--value", help="Write only the payload, byte for byte.")]
Json = Annotated[bool, Option("--json", help="Write JSON.")]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Log details as well.")]

#: Maximum of --limit: one more, which detects that there are more, still fits an int of Java.
MAX_LIMIT = 1_000_000_000

#: Columns of the longest bar.
BAR_WIDTH = 40

#: Bytes of a payload that are shown; `--value` writes all of it.
MAX_SHOWN_BYTES = 2_000

#: Columns of a table in a file or a pipe: wide enough that no id is cut.
PIPE_WIDTH = 250


def limit_option(text: str) -> Any:  # noqa: ANN401 (Typer's type)
    """Return the option `--limit` of a command that lists."""
    return Option("--limit", min=1, max=MAX_LIMIT, help=text)


def port_option(name: str, text: str) -> Any:  # noqa: ANN401 (Typer's type)
    """Return an option that takes a port."""
    return Option(name, min=1, max=65_535, help=text)


class BadInput(typer.TyperException):
    """The arguments contradict each other, or name a file that cannot be read. One sentence."""

    exit_code = 2


def settings_from(
    kafka: str | None, config: Path | None, **overrides: str | int | None
) -> Settings:
    """Return the settings: options over environment over file over defaults. Raises ConfigError."""
    if config:
        if not is_file(config):
            raise ConfigError(f"--config names {config}, which is no file: correct it")
        os.environ["DUETIME_CONFIG"] = str(config)
    return load_settings(bootstrap=kafka, **overrides)


def connected(kafka: str | None, config: Path | None, **overrides: str | int | None) -> Settings:
    """Return the settings once their cluster has answered. Raises ConfigError, KafkaError."""
    settings = settings_from(kafka, config, **overrides)
    ensure_reachable(settings)
    return settings


def instant_option_ms(text: str | None) -> int | None:
    """Return a bound such as `--from` in epoch ms. Raises InvalidMessage."""
    return None if text is None else parse_instant(text)


def console() -> Console:
    """Return the output of a command. Nothing in it is markup, or is coloured by guess."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def table(*headings: str, justify: Literal["left", "right"] = "left") -> Table:
    """Return an empty table without lines."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        made.add_column(heading, overflow="fold", justify=justify)
    return made


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a line for each pair: name, value, and further lines of the value below it."""
    rows = list(pairs)
    width = max((len(name) for name, _ in rows), default=0)
    indent = "\n" + " " * (width + 2)
    return "\n".join(f"{name:{width}}  {indent.join(text.split(chr(10)))}" for name, text in rows)


def histogram(rows: Sequence[tuple[str, int]]) -> Table:
    """Return a table with a bar for each label."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(justify="right", no_wrap=True)
    made.add_column(justify="right", no_wrap=True)
    made.add_column(no_wrap=True)
    longest = max((count for _, count in rows), default=0)
    for label, count in rows:
        # Any positive count is visible, by an eighth of a character.
        length = max(count, longest / (8 * BAR_WIDTH)) if count else 0
        made.add_row(label, f"{count:,}", Bar(longest, 0, length, width=BAR_WIDTH, color="cyan"))
    return made


def when(due_ms: int, now_ms: int) -> str:
    """Return an instant, and its distance from now."""
    distance = format_duration(abs(due_ms - now_ms))
    relative = f"in {distance}" if due_ms >= now_ms else f"{distance} ago"
    return f"{format_instant(due_ms)} ({relative})"


def size(count: int) -> str:
    """Return a number of bytes with its unit."""
    for unit, scale in (("MB", 1_000_000), ("kB", 1_000)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def printable(data: bytes | None, *, lines: bool = False) -> str:
    """Return bytes as text for a terminal, with escapes for control characters and no UTF-8.

    `lines` keeps line breaks and tabs.
    """
    if data is None:
        return "(null)"
    text = data.decode("utf-8", errors="backslashreplace")
    return escaped(text, kept="\n\t" if lines else "")


def record_facts(record: PendingMessage | DeadLetter) -> list[tuple[str, str]]:
    """Return the parts of a message other than its topic, for `facts`."""
    pairs = []
    if record.cluster is not None:
        pairs.append(("cluster", escaped(record.cluster)))
    if record.partition is not None:
        pairs.append(("partition", str(record.partition)))
    if record.key is not None:
        pairs.append(("key", printable(record.key)))
    pairs += [("header", f"{escaped(name)}={printable(each)}") for name, each in record.headers]
    value = record.value
    if value is None or (len(value) <= MAX_SHOWN_BYTES and _is_text(value)):
        shown = printable(value, lines=True)
    else:
        shown = f"{size(len(value))}; --value writes it to stdout"
    return [*pairs, ("value", shown)]


def _is_text(value: bytes) -> bool:
    try:
        return "\0" not in value.decode()
    except UnicodeDecodeError:
        return False


def home_relative(path: Path) -> str:
    """Return a path with ~ for the home directory."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)


def program() -> str:
    """Return how this program was called, to show commands that work in the same shell."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{_shell_path(sys.executable)} -m duetime"
    found = shutil.which(called.name)
    is_found = found and Path(found).resolve() == called.resolve()
    return called.name if is_found else _shell_path(sys.argv[0])


def _shell_path(path: str) -> str:
    relative = os.path.relpath(path)
    return shlex.quote(path if relative.startswith("..") else relative)
