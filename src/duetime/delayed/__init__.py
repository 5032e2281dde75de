"""Delayed topics (KIP-1277) on today's brokers: records that are read at or after a time of theirs.

entries     the arrays that an index is made of
cursor      which records are delivered, and how late ones are admitted
segments    stretches of the log
files       segments on a disk or in an object store
index       what is to be returned next
log         a partition's log, read by offset
payloads    records that are kept while they wait
partition   all of these, for one partition
opening     a partition where its group was
consumer    a consumer with confluent-kafka's manners
options     what it is told
message     what it returns
retries     when a record comes again, and what dies
putting_off sends these
source      a streaming source for Spark: the format `delayed_kafka`
planning    what a batch of it has
rows        the records of a batch
visible     a delayed topic made visible, for every client
forwarding  its sending side
outcomes    what becomes of each record
"""

from duetime.delayed.consumer import DelayedConsumer, Metrics
from duetime.delayed.message import DelayedMessage

__all__ = ["DelayedConsumer", "DelayedMessage", "Metrics"]
