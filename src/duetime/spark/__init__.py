"""Many messages at once, and everything that waits, as DataFrames of any Spark session.

```
bulk      schedule: a DataFrame -> records of the native intake topic, written by executors
waiting   pending: the wheel's partitions -> a DataFrame
session   a Spark with the connector in it, for who has none
```
No payload passes through the driver. The session may be the user's own: what is computed here does
not depend on its ANSI mode, its time zone, or what it does with duplicate keys of a map.
"""

import os

from pyspark.sql import SparkSession

from duetime.config import Settings, is_submitted, load_settings
from duetime.local.jars import pipeline_jars
from duetime.pipeline.session import spark_session
from duetime.spark.bulk import schedule
from duetime.spark.waiting import pending

__all__ = ["pending", "schedule", "session"]

#: Of a session that asks and does not deliver: tasks for the cores there are, and shuffles of
#: whatever size.
ASKING = {
    "spark.master": "local[*]",
    "spark.default.parallelism": str(os.cpu_count() or 1),
    "spark.sql.adaptive.enabled": "true",
}


def session(settings: Settings | None = None) -> SparkSession:
    """A Spark on this machine with Kafka's connector, or the one that `spark-submit` prepared.

    Raises SetupError where Java or the connector is missing.
    """
    settings = settings or load_settings()
    asking = settings.model_copy(update={"spark_properties": ASKING | settings.spark_properties})
    return spark_session(asking, [] if is_submitted() else pipeline_jars())
