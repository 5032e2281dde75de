"""Transactions that senders have open in topics, found by offsets: no broker is asked for its list.

The last stable offset of a partition is the first record of its oldest open transaction, or the end
of the partition. A reader of committed records stops there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from duetime.config import Settings
from duetime.stores import OffsetRange
from duetime.stores.offsets import Offsets
from duetime.stores.records import RangeReader


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransaction:
    """The oldest one that is open in a partition."""

    topic: str
    partition: int
    #: When its first record was appended, epoch ms.
    since_ms: int


def open_transactions(
    settings: Settings, offsets: Offsets, topics: Iterable[str]
) -> list[OpenTransaction]:
    """Return the oldest open transaction of each partition. Raises KafkaError, Unreadable."""
    places = [place for topic in topics for place in offsets.readable_places(topic)]
    # The ends first: a record that is appended between the two looks is in no open transaction.
    ends = offsets.ends(places)
    stable = offsets.ends(places, committed_only=True)
    ranges = [OffsetRange(*place, first, ends[place]) for place, first in stable.items()]
    firsts = [replace(each, end=each.start + 1) for each in ranges if each.count > 0]
    if not firsts:
        return []
    with RangeReader(settings, committed_only=False) as reader:
        return [
            OpenTransaction(
                topic=record.topic() or "",
                partition=record.partition() or 0,
                since_ms=record.timestamp()[1],
            )
            for record in reader.records(firsts)
        ]


def remedy(topic: str, transactional: str) -> str:
    """Return what an open transaction in this intake topic means, and what to do."""
    if topic == transactional:
        return (
            "later records of that partition wait for its end: end it, or abort it with "
            "kafka-transactions.sh where its producer is gone"
        )
    return (
        "intake does not wait for its end there, and delivers its records also if it is aborted: "
        f"send records of transactions to {transactional}"
    )
