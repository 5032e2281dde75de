"""A client of the countdown service: python caller.py KAFKA [INTAKE_TOPIC [TOPIC]].

It sends three countdowns, and reads what arrives for it from a topic that callers may share.
"""

import json
import sys
import time
import uuid

from confluent_kafka import Consumer, Producer

CALLER = "billing"

COUNTDOWNS = (5, 6, 7)

#: Time to wait after the last due time, in seconds.
ARRIVAL_TIMEOUT_S = 60


def main(kafka, intake="duetime.in.countdown", topic="invoices"):
    began_ms = time.time_ns() // 1_000_000
    send(kafka, intake, topic)
    print(f"{CALLER}  sent {len(COUNTDOWNS)}, due in {COUNTDOWNS} s", flush=True)
    for left, record in enumerate(arriving(kafka, topic, began_ms), start=1 - len(COUNTDOWNS)):
        late_ms = record.timestamp()[1] - due_at_ms(record)
        print(f"{CALLER}  {record.value().decode()} came {late_ms} ms after it was due")
        if left == 0:
            return 0
    return 1


def send(kafka, intake, topic):
    producer = Producer({"bootstrap.servers": kafka})
    # A request for its metadata creates the topic, on a cluster that allows it.
    producer.list_topics(topic)
    for number, seconds in enumerate(COUNTDOWNS, start=1):
        countdown = {"topic": topic, "message": {"invoice": number}, "countdown": seconds}
        headers = [("CALLER_SERVICE", CALLER)]
        producer.produce(intake, json.dumps(countdown).encode(), headers=headers)
    producer.flush()


def arriving(kafka, topic, since_ms):
    properties = {"group.id": f"{CALLER}-{uuid.uuid4()}", "auto.offset.reset": "earliest"}
    consumer = Consumer({"bootstrap.servers": kafka} | properties)
    consumer.subscribe([topic])
    until_s = time.monotonic() + max(COUNTDOWNS) + ARRIVAL_TIMEOUT_S
    while time.monotonic() < until_s:
        record = consumer.poll(1)
        if record is None or record.error():
            continue
        caller = dict(record.headers() or ()).get("CALLER_SERVICE")
        if caller == CALLER.encode() and due_at_ms(record) >= since_ms:
            yield record
    consumer.close()


def due_at_ms(record):
    return int(dict(record.headers())["due-at-ms"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
