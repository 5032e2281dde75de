"""Clients of Kafka and their answers: connections, topics, offsets, exact ranges of records."""
