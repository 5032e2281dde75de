"""What was read of a queue at once: what of it is messages, and where they are."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import confluent_kafka

from duetime.errors import KafkaError
from duetime.stores.places import Place

log = logging.getLogger(__name__)


def readable(records: Sequence[confluent_kafka.Message]) -> list[confluent_kafka.Message]:
    """Those that are messages. Raises KafkaError for an error that will not pass."""
    for each in records:
        error: Any = each.error()
        if error is not None and error.fatal():
            raise KafkaError(str(error.str()))
        if error is not None:
            log.warning("the queue was not read error=%s", error.str())
    return [each for each in records if each.error() is None]


def lasts(records: Sequence[confluent_kafka.Message]) -> Mapping[Place, int]:
    """The last offset of each partition."""
    return {(each.topic() or "", each.partition() or 0): each.offset() or 0 for each in records}


def firsts(records: Sequence[confluent_kafka.Message]) -> Mapping[Place, int]:
    """The first offset of each partition."""
    return lasts(list(reversed(records)))
