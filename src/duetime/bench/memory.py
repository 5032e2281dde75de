"""How much memory processes take."""

import os
import subprocess

from pyspark.sql import SparkSession

from duetime.pipeline.jvm import jvm_pid


def driver_rss_mb(spark: SparkSession) -> int:
    """Memory of this Python and its JVM that is in RAM, in MB."""
    return rss_mb(os.getpid(), jvm_pid(spark))


def rss_mb(*processes: int) -> int:
    """Memory of these processes, by their ids, that is in RAM, in MB."""
    listing = subprocess.run(
        ["ps", "-o", "rss=", "-p", ",".join(map(str, processes))],  # noqa: S607 (it is on PATH)
        check=True,
        capture_output=True,
        text=True,
    )
    return sum(int(kib) for kib in listing.stdout.split()) * 1_024 // 1_000_000
