"""Any Kafka topic as a work queue in the manner of kmq: each message is acknowledged by itself."""

from duetime.queue.circuit_breaker import BreakerPolicy
from duetime.queue.consumer import Queue
from duetime.queue.message import Message

__all__ = ["BreakerPolicy", "Message", "Queue"]
