"""Several records or none: one Kafka transaction.

Only for `duetime.in.tx`, of which intake reads committed records alone: it sees all of them or
none. A crash between two lines changes nothing, or everything.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import confluent_kafka

from duetime.client import producer_properties
from duetime.config import Settings
from duetime.errors import KafkaError
from duetime.outgoing import Outgoing

#: How long Kafka may take for one step of the transaction, in seconds.
TIMEOUT_S = 20.0

#: Others with transactions wait for this one: if it was left open, it may not last for long.
TRANSACTION = {"transaction.timeout.ms": 10_000, "delivery.timeout.ms": 10_000}


@contextmanager
def transaction(settings: Settings, name: str) -> Iterator[Callable[[Iterable[Outgoing]], None]]:
    """Gives what sends records. Commits at the end, aborts on any error. Raises KafkaError.

    Of two at once with one name, the later fences off the earlier, whose end fails.
    """
    producer = confluent_kafka.Producer(
        producer_properties(settings)
        | TRANSACTION
        | {"transactional.id": f"{settings.namespace}.{name}"}
    )

    def send(records: Iterable[Outgoing]) -> None:
        for record in records:
            producer.produce(
                record.topic, value=record.value, key=record.key, headers=list(record.headers)
            )
        producer.flush(TIMEOUT_S)

    try:
        producer.init_transactions(TIMEOUT_S)
        producer.begin_transaction()
    except confluent_kafka.KafkaException as error:
        raise _nothing_changed(error.args[0]) from error
    try:
        yield send
        producer.commit_transaction(TIMEOUT_S)
    except confluent_kafka.KafkaException as error:
        raise _failure(producer, error.args[0]) from error
    except BaseException:
        with suppress(confluent_kafka.KafkaException):
            producer.abort_transaction(TIMEOUT_S)
        raise


def _failure(producer: confluent_kafka.Producer, error: confluent_kafka.KafkaError) -> KafkaError:
    """What a failed transaction means. Its own end, if Kafka does not hear of ours, is an abort."""
    if error.txn_requires_abort():
        with suppress(confluent_kafka.KafkaException):
            producer.abort_transaction(TIMEOUT_S)
    if error.txn_requires_abort() or error.fatal():
        return _nothing_changed(error)
    return KafkaError(f"it is not known whether it is done ({error.str()}): look before you repeat")


def _nothing_changed(error: confluent_kafka.KafkaError) -> KafkaError:
    return KafkaError(f"not done ({error.str()}): nothing is changed, try again")
