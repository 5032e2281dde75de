"""The properties of a delayed consumer: librdkafka's, and those that begin with `delayed.`."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from duetime.core.clock import doubled_ms, duration_ms
from duetime.core.errors import ConfigError, validation_words
from duetime.core.setting_types import Count
from duetime.delayed.index import SegmentLimits

PREFIX = "delayed."

#: Prefixes of the properties that a consumer and a producer have in common.
SHARED = ("bootstrap.", "metadata.broker.", "security.", "sasl.", "ssl.", "client.", "log", "debug")

#: Properties that librdkafka must not see, because they are about the cursor and not an offset.
OURS = ("enable.auto.commit", "auto.commit.interval.ms", "auto.offset.reset")

#: librdkafka's names for one of the two values of auto.offset.reset.
EARLIEST = ("earliest", "smallest", "beginning")

#: Also of a path.
Text = Annotated[str, BeforeValidator(str)]


class ConsumerOptions(BaseModel):
    """The properties of a consumer, parsed: those with the prefix are named by their fields."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=lambda field: PREFIX + field.replace("_", "."),
    )

    #: For each client of the consumer.
    librdkafka: dict[str, Any] = Field(alias="librdkafka", repr=False)
    group: str = Field(alias="group.id", min_length=1)
    auto_commit: bool = Field(True, alias="enable.auto.commit")
    auto_commit_ms: int = Field(5_000, alias="auto.commit.interval.ms")
    auto_offset_reset: Literal["earliest", "latest", "smallest", "beginning", "largest", "end"] = (
        Field("earliest", alias="auto.offset.reset")
    )
    #: Attempts of the group at a record in all, and the waits between them.
    attempts: Count = 5
    backoff_ms: Count = 1_000
    backoff_max_ms: Count = 60_000
    dead_letter_topic: Text = "duetime.dead-letter"
    segment_records: Count = SegmentLimits().records
    segment_ms: Count = SegmentLimits().age_ms
    #: Directory or URL of the index files; None is no files: each start reads the log again.
    index_location: Text | None = None
    #: Memory for pending records, in bytes.
    kept_bytes: Count = 128 * 1024 * 1024
    #: A record with a longer delay is due at once; None is no limit.
    delivery_max_ms: Count | None = None

    @classmethod
    def of(cls, properties: Mapping[str, Any]) -> Self:
        """Parse the properties. Raises ConfigError, which names the property."""
        parsed: dict[str, Any] = {"librdkafka": {}}
        for name, value in properties.items():
            if not name.startswith(PREFIX) and name not in OURS:
                parsed["librdkafka"][name] = value
            if name in (*OURS, "group.id") or (name.startswith(PREFIX) and value not in (None, "")):
                parsed[name] = value
        try:
            return cls.model_validate(parsed)
        except ValidationError as error:
            (first, *_) = error.errors()
            raise ConfigError(
                f"property {first['loc'][0]} of a delayed consumer: {validation_words(first)}"
            ) from None

    @property
    def from_beginning(self) -> bool:
        """True if a group without a commit begins at the first record, not behind the last."""
        return self.auto_offset_reset in EARLIEST

    @property
    def limits(self) -> SegmentLimits:
        """When a segment of the index is closed."""
        return SegmentLimits(records=self.segment_records, age_ms=self.segment_ms)

    def shared(self) -> dict[str, Any]:
        """Return the properties that a producer for the same cluster needs."""
        return {name: value for name, value in self.librdkafka.items() if name.startswith(SHARED)}

    def retry_wait_ms(self, attempts: int, retry_in: timedelta | None) -> int:
        """Return the wait after this many attempts: `retry_in`, or a backoff that doubles."""
        if retry_in is not None:
            return max(0, duration_ms(retry_in))
        return doubled_ms(attempts, self.backoff_ms, self.backoff_max_ms)
