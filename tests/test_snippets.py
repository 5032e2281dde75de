"""What README and docs show is right: commands are parsed, settings read, Python run."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from duetime.cli import app, main
from duetime.cli.reference import reference
from duetime.config import Settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: Blocks of these pages are made from the code, see below.
MADE = {"cli.md"}

#: The first words of a command line; a block of anything else shows what comes out, or a drawing.
PROGRAMS = {"make", "duetime", ".venv/bin/duetime", "curl", "python3", "docker", "kubectl"}

#: Where a snippet says it, a test has another.
BOOTSTRAP = "127.0.0.1:9092"


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks():
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for found in fenced.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            if path.name not in MADE:
                yield Block(path.name, line, found[1], found[2])


BLOCKS = list(blocks())


def of(*languages):
    return [each for each in BLOCKS if each.language in languages]


def is_shell(block):
    words = re.sub(r"^(\w+=\S+ )*", "", block.text).split()
    return block.language == "" and (words[0] in PROGRAMS or re.match(r"\w+=\$\(", block.text))


SHELL = [each for each in BLOCKS if is_shell(each)]


def commands():
    """Every `duetime ...` of a block or a line of text, as its words."""
    for block in SHELL:
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            at = [number for number, word in enumerate(words) if word.endswith("bin/duetime")]
            at = at or [0] * (words[:1] == ["duetime"])
            yield from (words[number + 1 :] for number in at)
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        yield from (shlex.split(line) for line in re.findall(r"`duetime ([a-z][^`\n]*)`", text))


#: As a reader would fill in what is written in capitals.
COMMANDS = sorted(
    {
        tuple(
            "1" if re.fullmatch(r"[A-Z]+(\.\.\.)?", word) else word for word in words if word != "&"
        )
        for words in commands()
    }
)


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


@pytest.mark.system
@pytest.mark.usefixtures("on_broker", "topics")
@pytest.mark.parametrize("page", ["README.md", "index.md"])
def test_the_first_snippets_schedule_what_they_say(page, settings, capfd):
    (snippet,) = (each.text for each in of("python") if each.page == page)
    exec(compile(snippet.replace(BOOTSTRAP, settings.bootstrap), page, "exec"), {})  # noqa: S102 (ours)
    assert re.fullmatch(r"[0-9a-f]{12}-\S+\n", capfd.readouterr().out)
    if page == "index.md":
        for line in ("send greetings --in 10s --value hello", "pending"):
            assert main(line.split()) == 0


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.usefixtures("on_broker", "topics", "spark")
def test_the_snippets_with_dataframes_run(capfd):
    for block in of("python"):
        if block.page == "sql.md":
            # The wheel of the tests reaches an hour.
            text = block.text.replace("30 days 9 hours", "1 minute")
            exec(compile(text, str(block), "exec"), {})  # noqa: S102 (ours)
    assert capfd.readouterr().out.splitlines()[-1] == "1000"


def test_the_site_is_built_without_a_warning(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    quiet = {"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.name for path in tmp_path.glob("*.html")}
    assert {f"{path.stem}.html" for path in PAGES[1:]} <= pages
