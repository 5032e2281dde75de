"""docs/cli.md, made from the commands' own help: `python -m duetime.cli.reference >docs/cli.md`."""

import re
from collections.abc import Iterator
from inspect import cleandoc
from typing import Any

import typer

from duetime.cli.entry import app

HEAD = """\
# Commands

`duetime COMMAND --help` says the same. The [exit codes](operating.md#exit-codes) are those of all
commands. What no option says comes from the [configuration](configuration.md). `DUETIME_DEBUG=1`
shows the trace of an error.
"""

#: The type of an argument, which its help has behind its name.
TYPE = re.compile(r" <[a-z ]+>")


def reference() -> str:
    """All commands, in the order of `duetime --help`, as Markdown."""
    parts = [HEAD]
    for path, command in _commands(typer.main.get_command(app), "duetime"):
        context = command.make_context(path, [], resilient_parsing=True)
        usage = " ".join((path, *command.collect_usage_pieces(context)))
        parts.append(f"## {path}\n\n{cleandoc(command.help or '')}\n\n```\n{usage}\n```\n")
        rows = [_row(*each.get_help_record(context)) for each in command.params]
        if rows:
            parts.append("\n".join(["| | |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 (Typer's own)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _row(name: str, said: str) -> str:
    cells = (f"`{TYPE.sub('', name)}`", " ".join(said.split()))
    return "| " + " | ".join(each.replace("|", r"\|") for each in cells) + " |"


if __name__ == "__main__":
    typer.echo(reference(), nl=False)
