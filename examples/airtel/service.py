"""A client of the delay service: python service.py KAFKA [TOPIC [INTAKE_TOPIC [PORT]]].

It sends three messages with Airtel's envelope, and one that cannot be delivered: that is reported
to its webhook.
"""

import json
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer

from confluent_kafka import Consumer, Producer

DELAYS_S = (5, 6, 7)

#: Time to wait after the last due time, in seconds.
ARRIVAL_TIMEOUT_S = 60


def main(kafka, topic="paid_orders", intake="event_delayer_publisher", port="8080"):
    called_back, began_ms = threading.Event(), time.time_ns() // 1_000_000
    server = listening(int(port), called_back)
    send(kafka, topic, intake, f"http://127.0.0.1:{server.server_port}/failed")
    print(f"sent 3 messages due in {DELAYS_S} s, and one for a topic that cannot be", flush=True)
    arrived = 0
    for record in arriving(kafka, topic, began_ms):
        late_ms = record.timestamp()[1] - due_at_ms(record)
        print(f"{record.value().decode()} came {late_ms} ms after it was due", flush=True)
        arrived += 1
        if arrived == len(DELAYS_S):
            break
    is_called_back = called_back.wait(ARRIVAL_TIMEOUT_S)
    server.shutdown()
    return 0 if is_called_back and arrived == len(DELAYS_S) else 1


def send(kafka, topic, intake, callback):
    producer = Producer({"bootstrap.servers": kafka})
    # A request for its metadata creates the topic, on a cluster that allows it.
    producer.list_topics(topic)
    now_ms = time.time_ns() // 1_000_000
    wanted = [(topic, number, delay_s) for number, delay_s in enumerate(DELAYS_S, start=1)]
    # Kafka refuses a topic `a.b` if there is `a_b`, even if it creates topics automatically.
    for to, number, delay_s in [*wanted, (topic.replace("_", "."), 4, 1)]:
        envelope = {
            "topic": to,
            "key": str(number),
            "value": {"order": number},
            "headers": {"source": "service"},
            "postTime": now_ms + delay_s * 1_000,
            "failurePostCallbackUrl": callback,
        }
        producer.produce(intake, json.dumps(envelope).encode())
    producer.flush()


def arriving(kafka, topic, since_ms):
    properties = {"group.id": f"service-{uuid.uuid4()}", "auto.offset.reset": "earliest"}
    consumer = Consumer({"bootstrap.servers": kafka} | properties)
    consumer.subscribe([topic])
    until_s = time.monotonic() + max(DELAYS_S) + ARRIVAL_TIMEOUT_S
    while time.monotonic() < until_s:
        record = consumer.poll(1)
        if record is not None and not record.error() and due_at_ms(record) >= since_ms:
            yield record
    consumer.close()


def due_at_ms(record):
    return int(dict(record.headers())["due-at-ms"])


def listening(port, called_back):
    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()
            reason = f"{body['topic']}, {body['reason']}, after {body['attempts']} attempts"
            print(f"called back: {reason}", flush=True)
            called_back.set()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", port), Webhook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
