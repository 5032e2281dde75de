"""Giving disk back: records of the lanes that a committed batch has passed."""

import json

from pyspark.sql.streaming import StreamingQuery

from duetime.stores.kafka import KafkaStore


def free_lanes(store: KafkaStore, query: StreamingQuery) -> None:
    """Free what the last committed batch has read. Safe to repeat."""
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
