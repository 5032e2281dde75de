"""Lease: what each row checks, last before the sink, so that a former leader sends nothing.

A process may be paused at any instant (SIGSTOP, a long collection) without noticing. So each row
checks the *lease*: a system property of its JVM, in nanoseconds of that JVM's monotonic clock
(`spark.executors` brings it to those of other machines).

Each *term* has a lease of its own, and a plan names the lease of the term that it was made in. A
row that waits for the lease of an older term is never sent, even if the same process leads again:
others may have led in between, and have sent it.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.core.settings import Settings
from duetime.spark import catalyst
from duetime.spark.session import DEFAULT_LEASE, HELD, STARTED_BEFORE

#: Waits of a row for a lease that has ended, in ms: a broker that is restarted, or replaced by
#: others, is no reason to fail. After each it checks again, and after the last it raises.
WAITS_MS = (100, 400, 1_500, 3_000, 5_000, 5_000)


def lease_name(settings: Settings) -> str:
    """Return the name of the JVM's property with the lease of the settings' term.

    Term 0 has no lease: a plan outside of any term is not held up.
    """
    return f"{settings.namespace}.lease.{settings.term}"


def lease_is_held(settings: Settings) -> Column:
    """A filter for rows: true while we lead in the settings' term.

    Otherwise it waits a while for the lease, then raises. It raises also in a task that was started
    before: Spark repeats one whose executor was taken away, and the pipeline has not read back what
    that one has sent.
    """
    is_held = require_lease(
        lease_name(settings), "the lead is lost: the next leader sends the rest"
    )
    repeated = f"{STARTED_BEFORE}: the pipeline repeats it, without what it has sent"
    return F.when(catalyst.task_attempt() == 0, is_held).otherwise(raised(repeated))


def require_lease(name: str, otherwise: str) -> Column:
    """A filter for rows: true while the lease is held, waits a while for it, then raises."""
    found = _is_held(name)
    for wait_ms in reversed(WAITS_MS):
        found = _is_held(name) | (catalyst.slept(F.lit(wait_ms)) & found)
    return F.when(found, True).otherwise(raised(otherwise))


def raised(text: str) -> Column:
    """boolean: no value, but an error."""
    return F.raise_error(F.lit(text)).cast("boolean")


def _is_held(name: str) -> Column:
    default = catalyst.number_property(DEFAULT_LEASE, F.lit(int(HELD)))
    return catalyst.nano_time() < catalyst.number_property(name, default)
