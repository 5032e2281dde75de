"""Benchmarks, each a command: `duetime bench NAME`. Importing this does not import Spark."""

from duetime.bench.cli import app

__all__ = ["app"]
