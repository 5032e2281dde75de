"""Sends 100 messages to the queue: python examples/kmq/sender.py [BOOTSTRAP [TOPIC]]."""

import sys

from confluent_kafka import Producer

MESSAGES = 100


def send(bootstrap="127.0.0.1:9092", topic="example"):
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(MESSAGES):
        producer.produce(topic, f"job {number}", key=str(number))
    producer.flush()
    print(f"sent {MESSAGES} messages")


if __name__ == "__main__":
    send(*sys.argv[1:])
