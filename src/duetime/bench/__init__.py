"""Benchmarks, each a command: `duetime bench NAME`. What is imported here does not import Spark."""

from duetime.bench.commands import app

__all__ = ["app"]
