"""What a consumer of delayed topics is told, beside librdkafka's own properties."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from duetime.delayed.index import Limits
from duetime.delayed.retries import Policy
from duetime.errors import ConfigError

#: What our own properties begin with.
PREFIX = "delayed."

#: The beginnings of what a consumer's and a producer's properties have in common.
SHARED = ("bootstrap.", "metadata.broker.", "security.", "sasl.", "ssl.", "client.", "log", "debug")

#: What is ours to decide, because it is about the cursor and not about an offset.
OURS = ("enable.auto.commit", "auto.commit.interval.ms", "auto.offset.reset")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """A consumer's properties, taken apart."""

    #: For every client of the consumer.
    librdkafka: Mapping[str, Any] = field(repr=False)
    policy: Policy
    limits: Limits
    #: Where index files are kept; None is nowhere: the log is read again at each start.
    index_location: str | None
    #: How much memory the records that wait may take.
    kept_bytes: int
    #: What waits for longer comes at once; None is no limit.
    longest_ms: int | None
    dead_letters: str
    auto_commit: bool
    auto_commit_ms: int
    from_beginning: bool

    @classmethod
    def of(cls, properties: Mapping[str, Any]) -> Self:
        """Read them. Raises ConfigError, naming the property."""
        own = {name: value for name, value in properties.items() if name.startswith(PREFIX)}
        others = {name: value for name, value in properties.items() if name not in own}
        read = _Own(own)
        if not others.get("group.id"):
            raise ConfigError("group.id is missing: name the group that reads")
        options = cls(
            librdkafka={name: value for name, value in others.items() if name not in OURS},
            policy=Policy(
                group=str(others["group.id"]),
                attempts=read.number("attempts", 5),
                backoff_ms=read.number("backoff.ms", 1_000),
                backoff_max_ms=read.number("backoff.max.ms", 60_000),
            ),
            limits=Limits(
                records=read.number("segment.records", Limits().records),
                age_ms=read.number("segment.ms", Limits().age_ms),
            ),
            index_location=read.text("index.location"),
            kept_bytes=read.number("kept.bytes", 128 * 1024 * 1024),
            longest_ms=read.number("delivery.max.ms", 0) or None,
            dead_letters=read.text("dead.letter.topic") or "duetime.dead",
            auto_commit=str(others.get("enable.auto.commit", True)).lower() == "true",
            auto_commit_ms=int(others.get("auto.commit.interval.ms", 5_000)),
            from_beginning=_from_beginning(str(others.get("auto.offset.reset", "earliest"))),
        )
        read.check_all_known()
        return options

    def shared(self) -> dict[str, Any]:
        """What a producer for the same cluster needs."""
        return {name: value for name, value in self.librdkafka.items() if name.startswith(SHARED)}


class _Own:
    """Properties of ours, each read once."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._left = dict(given)

    def text(self, name: str) -> str | None:
        value = self._left.pop(PREFIX + name, None)
        return None if value is None else str(value)

    def number(self, name: str, default: int) -> int:
        value = self._left.pop(PREFIX + name, None)
        if value is None:
            return default
        if not str(value).isdecimal() or int(value) < 1:
            raise ConfigError(f"{PREFIX}{name} is {value!r}: give a whole number of 1 or more")
        return int(value)

    def check_all_known(self) -> None:
        for name in self._left:
            raise ConfigError(f"{name} is no property of a delayed consumer: see the documentation")


def _from_beginning(reset: str) -> bool:
    # librdkafka knows several words for the same.
    if reset in ("earliest", "smallest", "beginning"):
        return True
    if reset in ("latest", "largest", "end"):
        return False
    raise ConfigError(f"auto.offset.reset is {reset!r}: say earliest or latest")
