"""Kafka messages delivered when they are due: in 50 ms or in five years, never early, each once."""

__version__ = "0.1.0"
