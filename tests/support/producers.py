"""Metrics of producers, where none is."""

from duetime.spark.task_jvms import ProducerMetrics


class NoProducers(ProducerMetrics):
    """A JVM that has opened no producer so far."""

    def _read(self, pattern):  # noqa: ARG002 (there are none)
        return []
