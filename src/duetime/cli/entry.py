"""From arguments to an exit code. Every error is one sentence on stderr, never a stack trace.

```
0    done
1    something is wrong: Kafka, the machine, the settings
2    the arguments are: nothing was sent
3    too late: the message is delivered, or about to be
4    unknown: nothing that waits has this id, no dead letter this number
130  Ctrl-C
```
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from confluent_kafka import KafkaException

from duetime import __version__
from duetime.bench import app as bench_app
from duetime.cli import api, dead, demo, messages, pending, queue, recurring, serve, sql, topics
from duetime.errors import DuetimeError, InvalidMessage, TooLate, UnknownMessage

app = typer.Typer(
    name="duetime",
    help="Kafka messages delivered when they are due: in 50 ms or in five years.",
    add_completion=False,
    rich_markup_mode="rich",
)

for command in (
    serve.up,
    serve.run,
    api.api,
    messages.send,
    pending.pending,
    messages.show,
    messages.cancel,
    messages.reschedule,
    sql.sql,
    topics.topics,
    topics.doctor,
    topics.status,
    demo.demo,
):
    app.command()(command)
app.add_typer(dead.app, name="dead")
app.add_typer(queue.app, name="queue")
app.add_typer(recurring.app, name="recurring")
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def duetime(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Say which version this is.")] = False,
) -> None:
    """Kafka messages delivered when they are due: in 50 ms or in five years."""
    if version:
        typer.echo(f"duetime {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    _never_fail_to_print()
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="duetime", standalone_mode=False)
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 (all become a sentence)
        return _told(error)
    return code if isinstance(code, int) else 0


def _never_fail_to_print() -> None:
    # A terminal that has no ✓ gets a question mark, not an error.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _told(error: BaseException) -> int:
    """Say what is wrong, and give the exit code for it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return 130
    if os.environ.get("DUETIME_DEBUG"):
        traceback.print_exception(error)
    typer.echo(f"error: {_sentence(error)}", err=True)
    return _exit_code(error)


def _sentence(error: BaseException) -> str:
    if isinstance(error, typer.TyperException):
        # Of a group without a command, all that is said is its help, which has been shown.
        text = (error.format_message() or "a command is missing").rstrip(".") + _help_hint(error)
    elif isinstance(error, DuetimeError):
        text = error.detail
    elif isinstance(error, KafkaException):
        text = f"Kafka refused ({error.args[0].str()}): duetime doctor looks for the cause"
    else:
        first_line = (str(error).strip().splitlines() or [""])[0]
        text = (
            f"{type(error).__name__}: {first_line}: this is a fault in duetime, "
            "and DUETIME_DEBUG=1 shows where"
        )
    return " ".join(text.split())


def _help_hint(error: typer.TyperException) -> str:
    context: typer.Context | None = getattr(error, "ctx", None)
    return f": see {context.command_path} --help" if context else ""


def _exit_code(error: BaseException) -> int:
    if isinstance(error, typer.TyperException):
        return error.exit_code
    for kind, code in ((InvalidMessage, 2), (TooLate, 3), (UnknownMessage, 4)):
        if isinstance(error, kind):
            return code
    return 1
