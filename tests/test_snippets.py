"""What README and docs show is right: commands are parsed, settings read, Python run."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib

import confluent_kafka
import pytest
import typer
from tests.snippets import (
    BOOTSTRAP,
    OTHERS,
    PAGES,
    ROOT,
    SHELL,
    Enough,
    assigned,
    commands,
    of,
    run,
    started,
)
from tests.test_retry import sent, taken

from duetime.cli import app, main
from duetime.cli.reference import reference
from duetime.config import Settings

#: As a reader would fill in what is written in capitals.
COMMANDS = sorted(
    {
        tuple(
            "1" if re.fullmatch(r"[A-Z]+(\.\.\.)?", word) else word for word in words if word != "&"
        )
        for words in commands()
    }
)


#: What the first commands are to do, on a broker.
ASKED = {"send", "pending"}


def test_no_other_block_is_passed_over_than_those_that_are_no_commands():
    # The API's first answer, the drawings of all queries and of a queue, and a line of the log.
    known = ["api.md", "how-it-works.md", "operating.md", "queue.md"]
    assert [each.page for each in OTHERS] == known, list(map(str, OTHERS))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_is_one_that_the_program_takes(words):
    command, path, rest = typer.main.get_command(app), "duetime", list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        path = f"{path} {rest[0]}"
        command = command.commands[rest.pop(0)]
    # A command may be named without what it needs, but not with what it does not take.
    assert path != "duetime"
    command.make_context(path, rest, resilient_parsing=not any(each[:1] == "-" for each in rest))


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_block_of_commands_is_a_shells(block):
    subprocess.run(["/bin/bash", "-n", "-c", block.text], check=True)
    targets = re.findall(
        r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(re.findall(r"^make ([a-z]+)", block.text, re.MULTILINE)) <= set(targets)
    for name in re.findall(r"\bdeploy/\S+", block.text):
        assert (ROOT / name).exists()


#: Variables of the environment that are no settings.
NO_SETTINGS = {"DUETIME_JARS", "DUETIME_CONFIG"}


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_settings_that_commands_are_given_are_taken(block, monkeypatch):
    for line in block.text.splitlines():
        given = assigned(line)
        with monkeypatch.context() as patch:
            for name in given.keys() - NO_SETTINGS:
                # Any other would be passed over.
                assert name.removeprefix("DUETIME_").lower() in Settings.model_fields
                patch.setenv(name, given[name])
            Settings()


def test_commands_are_found_behind_what_sets_them_and_in_containers():
    lines = {
        "DUETIME_STORE=redis://a duetime run": [["run"]],
        "docker run --name duetime -v duetime:/x -e A=b duetime topics": [["topics"]],
        "docker run -d --name duetime duetime": [["run"]],
        "docker build -t duetime .": [],
    }
    for line, found in lines.items():
        assert list(started(shlex.split(line))) == found
    assert {("run",), ("topics",)} <= set(COMMANDS)


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_settings_that_are_shown_are_taken(block):
    Settings(**tomllib.loads(block.text))


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_that_is_shown_is_json(block):
    json.loads(block.text)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_that_is_shown_is_python_and_imports_what_there_is(block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, each.name) for each in node.names)


def test_the_commands_page_is_made_from_the_commands():
    made = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert made == reference(), "python -m duetime.cli.reference >docs/cli.md"


def test_python_is_run_by_a_test_of_its_page():
    tests = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_snippets.py")
    )
    assert {each.page for each in of("python")} <= set(re.findall(r'"([\w-]+\.md)"', tests))


@pytest.mark.system
@pytest.mark.usefixtures("on_broker", "topics")
@pytest.mark.parametrize("page", ["README.md", "index.md"])
def test_the_first_snippets_schedule_what_they_say_and_read_what_arrives(page, settings, capfd):
    by_import = {each.text.split()[1]: each for each in of("python", page=page)}
    reader, sender = by_import.pop("confluent_kafka"), by_import.pop("datetime")
    assert not by_import
    topic = f"{settings.namespace}-greetings"
    own = {BOOTSTRAP: settings.bootstrap, '"greetings"': f'"{topic}"'}
    run(sender, own)
    assert re.fullmatch(r"[0-9a-f]{12}-\S+\n", capfd.readouterr().out)

    # What a pipeline would do now.
    (record,) = taken(settings, f"{settings.namespace}.in", settings.intake_partitions, 1)
    sent(settings, dict(record.headers())["due-topic"].decode(), headers=[], value=record.value())
    run(reader, own)
    assert capfd.readouterr().out == "b'hello'\n"


@pytest.mark.system
@pytest.mark.usefixtures("on_broker", "topics")
def test_the_first_commands_do_what_they_say(capfd):
    first = [words for words in commands("README.md", "index.md") if words[0] in ASKED]
    assert {words[0] for words in first} == ASKED
    for words in first:
        assert main(words) == 0, words
        assert capfd.readouterr().out


@pytest.mark.system
@pytest.mark.usefixtures("on_broker", "topics")
def test_a_message_that_comes_again_is_asked_for_as_the_page_says(settings):
    (snippet,) = of("python", page="contracts.md")
    run(snippet, {BOOTSTRAP: settings.bootstrap})

    (record,) = taken(settings, f"{settings.namespace}.in", settings.intake_partitions, 1)
    headers = dict(record.headers())
    assert (headers["due-topic"], headers["due-id"]) == (b"reports", b"daily-report")
    assert (headers["due-cron"], headers["due-zone"]) == (b"0 9 * * 1-5", b"Europe/Berlin")
    assert headers["due-misfire"] == b"skip"


class OneMessage(confluent_kafka.Consumer):
    """Reads from the beginning, and that is enough when something is committed."""

    def __init__(self, properties):
        super().__init__(properties | {"auto.offset.reset": "earliest"})

    def commit(self, message):
        super().commit(message, asynchronous=False)
        self.close()
        raise Enough


@pytest.mark.system
@pytest.mark.usefixtures("on_broker", "topics")
def test_the_loop_with_a_handler_that_fails_tries_again_later(settings, monkeypatch):
    _, loop = of("python", page="api.md")
    topic = f"{settings.namespace}-orders"
    # A record of no bytes is false to Python.
    sent(settings, topic, headers=[], value=b"")
    monkeypatch.setattr(confluent_kafka, "Consumer", OneMessage)
    own = {BOOTSTRAP: settings.bootstrap, '"orders"': f'"{topic}"', "    ...": "    work()"}
    with pytest.raises(Enough):
        # Nobody has said what the work is, so it fails.
        run(loop, own)

    monkeypatch.undo()
    (again,) = taken(settings, f"{settings.namespace}.in", settings.intake_partitions, 1)
    assert dict(again.headers())["due-retried"].startswith(b"1:")


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.usefixtures("on_broker", "topics")
def test_the_snippets_with_dataframes_run(spark, settings, capfd):
    waiting, reminders = of("python", page="sql.md")
    run(waiting)
    # The wheel of the tests reaches an hour.
    run(reminders, {"30 days 9 hours": "1 minute"})
    assert capfd.readouterr().out.splitlines()[-1] == "1000"

    *_, source = of("python", page="delayed-topics.md")
    orders = run(source, {BOOTSTRAP: settings.bootstrap}, spark=spark)["orders"]
    assert orders.isStreaming
    assert "deliver_after" in orders.columns


def test_the_site_is_built_without_a_warning(tmp_path):
    # Not quietly: what is not said is not counted either.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    quiet = {"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (done.returncode, re.findall("^(?!INFO).+", done.stderr, re.MULTILINE)) == (0, [])
    pages = {path.name for path in tmp_path.glob("*.html")}
    assert {f"{path.stem}.html" for path in PAGES[1:]} <= pages
