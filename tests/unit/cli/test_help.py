"""Help for every command, without Spark."""

import subprocess
import sys

import pytest
import typer

from duetime.cli import app

#: Packages that take long to import, for one command or none.
LATER = {"pyspark", "pyarrow", "numpy", "starlette", "uvicorn", "httpx", "redis", "aerospike"}


def commands(group, path=()):
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


EVERYTHING = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", EVERYTHING, ids=" ".join)
def test_everything_has_help(duetime, path):
    outcome = duetime(*path, "--help")

    assert outcome.code == 0
    assert f"Usage: {' '.join(('duetime', *path))}" in outcome.out


def test_the_bare_command_shows_its_help(duetime):
    assert duetime().out == duetime("--help").out


def test_the_command_starts_without_heavy_imports():
    # In a process of its own: here, everything is imported.
    said = subprocess.run(
        [sys.executable, "-c", "import sys, duetime.cli; print(*sys.modules)"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    assert not LATER & set(said.split())


def test_the_version_is_the_packages(duetime):
    assert duetime("--version").out.startswith("duetime 0.")
