"""Kafka, the pipeline, a sender and a processor in one process.

python examples/kmq/embedded.py
"""

import tempfile
import threading
from pathlib import Path

import processor
import sender

from duetime.core.settings import QueueSettings, load_settings
from duetime.kafka.admin import create_topics
from duetime.local.broker import LocalBroker
from duetime.local.jars import pipeline_jars
from duetime.pipeline.service import Pipeline


def main():
    queues = {"example": QueueSettings(partitions=4, redeliveries=100)}
    with tempfile.TemporaryDirectory() as scratch, LocalBroker(Path(scratch, "broker")) as broker:
        settings = load_settings(
            bootstrap=broker.bootstrap,
            queues=queues,
            checkpoint=Path(scratch, "checkpoint").as_uri(),
            warm_up_seconds=0,
        )
        create_topics(settings)
        sender.send(broker.bootstrap)
        print("starting the pipeline, which redelivers what is dropped ...", flush=True)
        with Pipeline(settings, jars=pipeline_jars()) as pipeline:
            threading.Thread(target=pipeline.watch, daemon=True).start()
            processor.main(broker.bootstrap)


if __name__ == "__main__":
    main()
