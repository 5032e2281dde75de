"""Messages for handlers, and the records that handlers send."""

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.topics import first_records

from duetime.kafka.connection import librdkafka_properties


def sent(settings, topic, headers, value=b"v"):
    """Send a message, and return it as a consumer reads it."""
    admin = AdminClient(librdkafka_properties(settings))
    for made in admin.create_topics([NewTopic(topic, 1)]).values():
        made.exception()
    producer, reports = Producer(librdkafka_properties(settings)), []
    producer.produce(
        topic, value, b"k", headers=headers, on_delivery=lambda *each: reports.append(each)
    )
    producer.flush()
    offset = reports[0][1].offset()
    return first_records(settings, topic, 1, offset)[0]
