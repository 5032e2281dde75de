"""Leases: what rows may rely on until an instant, and must look at last before the sink.

A lease is a system property of the JVM, in nanoseconds of the monotonic clock, which Python and
Java share. Whoever keeps it extends it; if the whole process was paused meanwhile, it is over when
a row looks. Only where driver and executors share a JVM: elsewhere there is no property, and a row
has nothing to look at.
"""

from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime import java

#: How long a row waits for a lease that has ended, in ms: a broker that is started again is no
#: reason to fail. Each time it looks again, and after the last it raises.
WAITS_MS = (100, 400, 1_500, 3_000, 5_000)


def held(name: str, otherwise: str) -> Column:
    """A filter for rows: true while the lease is held, waits a while for it, then raises."""
    found = _is_held(name)
    for wait_ms in reversed(WAITS_MS):
        found = _is_held(name) | (java.slept(F.lit(wait_ms)) & found)
    return F.when(found, True).otherwise(F.raise_error(F.lit(otherwise)).cast("boolean"))


def hold(jvm: Any, name: str, until_s: float) -> None:  # noqa: ANN401 (py4j's view of the JVM has no type)
    """Extend the lease until an instant of the monotonic clock, in seconds; 0 ends it."""
    java.java_class(jvm, "java.lang.System").setProperty(name, str(int(until_s * 1e9)))


def _is_held(name: str) -> Column:
    lease = java.system_property(F.lit(name)).cast("bigint")
    return java.nano_time() < F.coalesce(lease, F.lit(2**63 - 1))
