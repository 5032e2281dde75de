"""Giving disk back: records that a committed batch has passed."""

import json

from pyspark.sql.streaming import StreamingQuery

from duetime.stores.kafka import KafkaStore


def free_read(store: KafkaStore, query: StreamingQuery) -> None:
    """Free what was read before the last committed batch. Safe to repeat."""
    progress = query.lastProgress
    if not progress or not progress["sources"]:
        return
    start = progress["sources"][0]["startOffset"]
    # The first batch has begun nowhere: None, or "null".
    offsets = json.loads(start) if isinstance(start, str) else start
    if offsets:
        store.free(
            {(topic, int(each)): at for topic, ends in offsets.items() for each, at in ends.items()}
        )
