"""A pipeline of its own process whose clock is set: to so many ms ahead, a line on stdin each."""

import sys
import threading

from duetime.core.clock import SystemClock
from duetime.core.settings import Settings
from duetime.local.jars import pipeline_jars
from duetime.pipeline.service import Pipeline
from duetime.spark.columns import simulated_clock
from duetime.spark.session import jvm, spark_session


class SetClock(SystemClock):
    """This machine's clock, and so many ms."""

    ahead_ms = 0

    def now_ms(self):
        return super().now_ms() + self.ahead_ms


def main():
    settings, jars, clock = Settings(), pipeline_jars(), SetClock()
    with (
        simulated_clock(jvm(spark_session(settings, jars))) as set_ahead,
        Pipeline(settings, jars=jars, clock=clock) as pipeline,
    ):
        threading.Thread(target=pipeline.watch, daemon=True).start()
        print("ready", flush=True)
        for line in sys.stdin:
            clock.ahead_ms = int(line)
            set_ahead(clock.ahead_ms)
            print("set", flush=True)
        pipeline.ask_to_stop()


if __name__ == "__main__":
    main()
