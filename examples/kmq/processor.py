"""Works on the queue, and drops 1 in 10: python examples/kmq/processor.py [BOOTSTRAP [TOPIC]].

A dropped message is redelivered after 5 seconds. Ends when all 100 are done.
"""

import random
import sys
from collections import Counter
from datetime import timedelta

from rich.live import Live
from rich.table import Table
from sender import MESSAGES

from duetime.core.settings import load_settings
from duetime.queue import Queue

TIMEOUT = timedelta(seconds=5)


def process(settings, topic="example"):
    """Work on messages until all are done; return the number of deliveries of each."""
    delivered, done = Counter(), set()
    with (
        Queue(topic, group="workers", settings=settings, timeout=TIMEOUT, prefetch=10) as queue,
        Live(refresh_per_second=10) as live,
    ):
        for message in queue:
            job = message.value.decode()
            delivered[job] += 1
            # A worker that dies does not acknowledge its message: this one imitates it.
            if random.random() > 0.1:  # noqa: S311 (no secret)
                message.ack()
                done.add(job)
            live.update(table(delivered, done))
            if len(done) == MESSAGES:
                break
    return delivered


def table(delivered, done):
    shown = Table("delivered", "done", "dropped, to be redelivered")
    waiting = sorted(delivered.keys() - done)
    again = ", ".join(f"{job} (x{delivered[job]})" for job in waiting) or "-"
    shown.add_row(str(delivered.total()), f"{len(done)} of {MESSAGES}", again)
    return shown


def main(bootstrap="127.0.0.1:9092", topic="example"):
    delivered = process(load_settings(bootstrap=bootstrap), topic)
    again = delivered.total() - MESSAGES
    print(f"all {MESSAGES} messages are done; {again} deliveries were dropped and repeated")


if __name__ == "__main__":
    main(*sys.argv[1:])
