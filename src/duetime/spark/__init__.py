"""Spark primitives: session, Kafka sources and sinks, columns, Catalyst. Knows no query."""
