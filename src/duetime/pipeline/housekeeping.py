"""What is done beside delivering: disk given back, and what went wrong counted."""

import json
import logging

from pyspark.sql.streaming import StreamingQuery

from duetime.config import Settings
from duetime.stores.kafka import KafkaStore
from duetime.stores.offsets import Offsets
from duetime.topics import TopicNames

log = logging.getLogger(__name__)


def free_read(store: KafkaStore, query: StreamingQuery, kept_since_ms: int | None = None) -> None:
    """Free what was read before the last committed batch, and appended before. Safe to repeat."""
    progress = query.lastProgress
    if not progress or not progress["sources"]:
        return
    start = progress["sources"][0]["startOffset"]
    # The first batch has begun nowhere: None, or "null".
    offsets = json.loads(start) if isinstance(start, str) else start
    if offsets:
        store.free(
            {
                (topic, int(each)): at
                for topic, ends in offsets.items()
                for each, at in ends.items()
            },
            kept_since_ms,
        )


class Tally:
    """Counts rejected messages and dead letters, and tells when there are more."""

    def __init__(self, settings: Settings) -> None:
        names = TopicNames(settings)
        self._words = {names.rejected: "rejected", names.dead: "dead letters"}
        self._offsets = Offsets(settings, f"{settings.namespace}.tally")
        self._counted = self._count()

    def tell(self) -> None:
        """Log what was added since the last time."""
        counted = self._count()
        for topic, total in counted.items():
            if more := total - self._counted[topic]:
                what = self._words[topic]
                log.warning("%s messages=%d total=%d topic=%s", what, more, total, topic)
        self._counted = counted

    def close(self) -> None:
        """Close the connection."""
        self._offsets.close()

    def _count(self) -> dict[str, int]:
        """Records that were ever appended to each topic, which has one partition."""
        ends = self._offsets.ends([(topic, 0) for topic in self._words])
        return {topic: end for (topic, _), end in ends.items()}
