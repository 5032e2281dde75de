"""Tables, bars and times as people read them. Pure functions, but for the consoles.

Everything that comes out of a message goes through `printable`: bytes that somebody else chose must
not steer the terminal.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from duetime.clock import format_duration, format_instant
from duetime.dead import DeadLetter
from duetime.stores import Found
from duetime.wording import escaped

#: Eighths of a character, so that a bar is exact to an eighth.
EIGHTHS = " ▏▎▍▌▋▊▉█"

LINE_BREAK = "\n"

#: Columns of the longest bar.
BAR_WIDTH = 40

#: Bytes of a payload that are shown; `--value` gives all of it.
SHOWN_BYTES = 2_000

#: Columns of a table in a file or a pipe, where there is no window to fit: ids are never cut.
PIPE_WIDTH = 250


def console(*, stderr: bool = False) -> Console:
    """Where a command writes to. Nothing in what it writes is markup, or is coloured by guess."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def table(*headings: str) -> Table:
    """An empty table without lines."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A line each: names on the left, values on the right, further lines of a value under it."""
    rows = list(pairs)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(
        f"{name:{width}}  {value.replace(LINE_BREAK, LINE_BREAK + ' ' * (width + 2))}"
        for name, value in rows
    )


def histogram(rows: Sequence[tuple[str, int]]) -> Table:
    """A bar for each label."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(justify="right", no_wrap=True)
    made.add_column(justify="right", no_wrap=True)
    made.add_column(no_wrap=True, style="cyan")
    most = max((count for _, count in rows), default=0)
    for label, count in rows:
        made.add_row(label, f"{count:,}", bar(count, most))
    return made


def bar(count: int, most: int, width: int = BAR_WIDTH) -> str:
    """A bar as long as `count` is of `most`; whatever is not nothing is seen."""
    if count <= 0 or most <= 0:
        return ""
    eighths = max(1, count * width * 8 // most)
    whole, rest = divmod(eighths, 8)
    return (EIGHTHS[8] * whole + EIGHTHS[rest]).rstrip()


def when(due_ms: int, now_ms: int) -> str:
    """An instant, and how far away it is."""
    distance = format_duration(abs(due_ms - now_ms))
    relative = f"in {distance}" if due_ms >= now_ms else f"{distance} ago"
    return f"{format_instant(due_ms)} ({relative})"


def size(count: int) -> str:
    """Bytes as people read them."""
    for unit, scale in (("MB", 1_000_000), ("kB", 1_000)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def printable(data: bytes | None, *, lines: bool = False) -> str:
    """Bytes as text for a terminal: what is not UTF-8, or not to be seen, as escapes.

    `lines` keeps line breaks and tabs.
    """
    if data is None:
        return "(null)"
    text = data.decode("utf-8", errors="backslashreplace")
    return escaped(text, kept="\n\t" if lines else "")


def record_facts(record: Found | DeadLetter) -> list[tuple[str, str]]:
    """Where a message goes besides its topic, and what it has in it, for `facts`."""
    pairs = []
    if record.cluster is not None:
        pairs.append(("cluster", escaped(record.cluster)))
    if record.partition is not None:
        pairs.append(("partition", str(record.partition)))
    if record.key is not None:
        pairs.append(("key", printable(record.key)))
    pairs += [("header", f"{escaped(name)}={printable(each)}") for name, each in record.headers]
    return [*pairs, ("value", _payload(record.value))]


def _payload(value: bytes | None) -> str:
    """A payload where a person can read it, else its size."""
    if value is None:
        return "(null)"
    if len(value) > SHOWN_BYTES or not _is_text(value):
        return f"{size(len(value))}; --value writes it to stdout"
    return printable(value, lines=True)


def home_relative(path: Path) -> str:
    """A path with ~ for the home directory."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)


def program() -> str:
    """How this program was called, for commands that are shown to be run: from a shell, here."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{_from_here(sys.executable)} -m duetime"
    found = shutil.which(called.name)
    is_found = found and Path(found).resolve() == called.resolve()
    return called.name if is_found else _from_here(sys.argv[0])


def _from_here(path: str) -> str:
    """A path as a shell needs it, from the working directory where it is below that."""
    relative = os.path.relpath(path)
    return shlex.quote(path if relative.startswith("..") else relative)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in value
