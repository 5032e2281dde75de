"""Servers on this machine: Java, the jars, and a Kafka broker as a child process."""
