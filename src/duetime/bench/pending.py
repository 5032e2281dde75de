"""`duetime bench pending`: what millions of waiting messages cost the driver, and punctuality.

The same steady load three times through one pipeline: to get warm, with nothing waiting, and with
the backlog, which the load generator writes straight into the slots of the wheel. What came is read
at the end, so that reading does not grow the process that is measured.
"""

from dataclasses import dataclass

from duetime.bench.backlog import fill_backlog
from duetime.bench.lateness import deliver, running_pipeline
from duetime.bench.load import LoadPlan
from duetime.bench.memory import driver_rss_mb
from duetime.bench.report import Report, measure
from duetime.config import Settings

#: The steady load beside it.
RATE = 1_000
DELAY_MS = (5_000, 30_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The driver without and with the backlog."""

    rss_mb_before: int
    rss_mb_after: int
    without: Report
    with_backlog: Report

    def figures(self) -> dict[str, int | None]:
        """The result as it is shown."""
        return {
            "driver_rss_mb_before": self.rss_mb_before,
            "driver_rss_mb_after": self.rss_mb_after,
            "p99_ms": self.with_backlog.p99_ms,
            "p99_ms_without": self.without.p99_ms,
            "lost": self.without.lost + self.with_backlog.lost,
            "duplicated": self.without.duplicated + self.with_backlog.duplicated,
            "early": self.without.early + self.with_backlog.early,
        }


def pending(settings: Settings, messages: int, seconds: int, value_bytes: int) -> Cost:
    """Deliver at a steady rate without and with a backlog of so many messages."""
    steady = LoadPlan(messages=RATE * seconds, rate=RATE, delay_ms=DELAY_MS, destinations=())
    with running_pipeline(settings) as pipeline:
        # A JVM goes on growing for some minutes after it is ready.
        deliver(settings, steady, "before")
        without, sent_without = deliver(settings, steady, "without")
        before = driver_rss_mb(pipeline.spark)
        fill_backlog(settings, messages, value_bytes)
        beside, sent_beside = deliver(settings, steady, "with")
        after = driver_rss_mb(pipeline.spark)
    return Cost(
        rss_mb_before=before,
        rss_mb_after=after,
        without=measure(settings, without, sent_without.sent),
        with_backlog=measure(settings, beside, sent_beside.sent),
    )
