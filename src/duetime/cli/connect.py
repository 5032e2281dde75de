"""The settings of a command, once their cluster has answered."""

from pathlib import Path

from duetime.cli.options import settings_from
from duetime.config import Settings
from duetime.reach import require_kafka


def connected(
    kafka: str | None,
    config: Path | None,
    store: str | None = None,
    start_from: str | None = None,
) -> Settings:
    """The settings, once their cluster has answered. Raises ConfigError, KafkaError."""
    settings = settings_from(kafka, config, store=store, start_from=start_from)
    require_kafka(settings)
    return settings
