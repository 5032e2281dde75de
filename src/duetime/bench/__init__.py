"""Benchmarks, each a command: `duetime bench NAME`. What is imported here does not import Spark."""

from duetime.bench import commands_around
from duetime.bench.commands import app

__all__ = ["app", "commands_around"]
