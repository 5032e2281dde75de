"""Help for everything, at once, and without Spark."""

import resource
import subprocess
import sys

import pytest
import typer

from duetime.cli import app

#: In one process, so that what the command imports is all that there is.
IMPORTS = "import sys, duetime.cli; sys.exit('pyspark' in sys.modules)"


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


def test_the_command_starts_without_spark():
    assert subprocess.run([sys.executable, "-c", IMPORTS], check=False).returncode == 0


def test_help_takes_less_than_half_a_second():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "duetime", "--help"], check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    # Of a core's time: whoever else uses this machine is no fault of the command.
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.5


def test_the_version_is_the_packages(duetime):
    assert duetime("--version").out.startswith("duetime 0.")
