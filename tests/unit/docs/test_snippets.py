"""What README and docs show is right: commands are parsed, settings read, Python run."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import typer
from tests.support.snippets import COMMANDS, OTHERS, PAGES, ROOT, SHELL, assigned, of, started

from duetime.cli import app
from duetime.core.settings import Settings

#: Makes docs/cli.md.
CLI_PAGE = "python -m typer duetime.cli utils docs --name duetime --title Commands --output"


def test_no_other_block_is_passed_over_than_those_that_are_no_commands():
    # The API's first answer, the drawings of all queries and of a queue, and a line of the log.
    known = ["api.md", "how-it-works.md", "monitoring.md", "queue-reference.md"]
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
        r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE)) <= set(targets)
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


def test_the_commands_page_is_made_from_the_commands(tmp_path):
    page, made = ROOT / "docs" / "cli.md", tmp_path / "cli.md"
    command = [sys.executable, *CLI_PAGE.split()[1:], str(made)]
    subprocess.run(command, check=True, capture_output=True)
    assert page.read_text() == made.read_text(), f"{CLI_PAGE} docs/cli.md"


def test_python_is_run_by_a_test_of_its_page():
    tests = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_snippets.py")
    )
    assert {each.page for each in of("python")} <= set(re.findall(r'"([\w-]+\.md)"', tests))


def test_the_site_is_built_without_a_warning(tmp_path):
    # Not quietly: what is not said is not counted either.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    quiet = {"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (done.returncode, re.findall("^(?!INFO).+", done.stderr, re.MULTILINE)) == (0, [])
    pages = {path.name for path in tmp_path.glob("*.html")}
    assert {f"{path.stem}.html" for path in PAGES[1:]} <= pages
