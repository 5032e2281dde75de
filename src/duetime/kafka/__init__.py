"""Clients of Kafka and their answers: connections, topics, offsets, ranges of records, the lead."""
