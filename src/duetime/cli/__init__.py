"""The `duetime` command. It starts without Spark: a command imports what it needs when it runs.

```
terminal   options of several commands, the settings that result, and text for people
logs       the log of `up`, `run` and `api`, as text or JSON
messages   send, show, cancel, reschedule, pending
manage     dead-letters, queue, schedules
sql        pending messages, queried with SQL
admin      topics, doctor, status
run        up, run, api: the pipeline in a thread, stopped in time by a signal
demo       a temporary Kafka, 1,000 messages, and their lateness
```

From arguments to an exit code. Every error is one sentence on stderr, never a stack trace.

```
0    done
1    something is wrong: Kafka, the machine, the settings
2    the arguments are wrong: nothing was sent
3    too late: the message is delivered, or about to be
4    unknown: no pending message has this id, or no dead letter this offset
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
from typer import Option

from duetime import __version__
from duetime.bench import app as bench_app
from duetime.cli import admin, demo, manage, messages, run, sql
from duetime.core.errors import DuetimeError, InvalidMessage, TooLate, UnknownMessage

app = typer.Typer(name="duetime", add_completion=False, rich_markup_mode="markdown")

for command in (
    run.up,
    run.run,
    run.api,
    messages.send,
    messages.pending,
    messages.show,
    messages.cancel,
    messages.reschedule,
    sql.sql,
    admin.topics,
    admin.doctor,
    admin.status,
    demo.demo,
):
    app.command()(command)
app.add_typer(manage.dead_letters_app, name="dead-letters")
app.add_typer(manage.queue_app, name="queue")
app.add_typer(manage.schedules_app, name="schedules")
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def duetime(
    context: typer.Context,
    *,
    version: Annotated[bool, Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Kafka messages delivered when they are due: in 50 ms or in five years.

    Settings without an option come from duetime.toml and the environment. DUETIME_DEBUG=1 shows the
    stack trace of an error.
    """
    if version:
        typer.echo(f"duetime {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal without ✓ gets a question mark, not an error.
            stream.reconfigure(errors="replace")
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="duetime", standalone_mode=False)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:  # noqa: BLE001 (each becomes a sentence)
        if os.environ.get("DUETIME_DEBUG"):
            traceback.print_exception(error)
        typer.echo(f"error: {_sentence(error)}", err=True)
        return _exit_code(error)
    return code if isinstance(code, int) else 0


def _sentence(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        # A group without a command has shown its help, and has no message.
        text = (error.format_message() or "a command is missing").rstrip(".")
        context: typer.Context | None = getattr(error, "ctx", None)
        text += f": see {context.command_path} --help" if context else ""
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


def _exit_code(error: Exception) -> int:
    if isinstance(error, typer.TyperException):
        return error.exit_code
    for kind, code in ((InvalidMessage, 2), (TooLate, 3), (UnknownMessage, 4)):
        if isinstance(error, kind):
            return code
    return 1
