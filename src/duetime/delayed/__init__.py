"""Delayed topics (KIP-1277) on today's brokers: each record is read at or after its own time.

consumer        a consumer with confluent-kafka's interface, and the messages that it returns
group           a consumer's properties, the retries and dead letters of its group
partition       one partition: its index, its position and its cached records
index           which records are due next, and the cursor: which are delivered
segments        entries of the index, in memory and as Parquet files
forwarder       sends the due records of a delayed topic to its visible topic
spark_source    a streaming source for Spark: the format `delayed_kafka`
batch_planner   plans the batches of that source
"""

from duetime.delayed.consumer import DelayedConsumer, DelayedMessage, Metrics

__all__ = ["DelayedConsumer", "DelayedMessage", "Metrics"]
