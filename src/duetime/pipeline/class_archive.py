"""Class archive of Spark: `python -m duetime.pipeline.class_archive`, a part of `make setup`.

A session does what each pipeline does at its start, on no records, and ends normally: then Java
writes the classes that it has loaded (`duetime.local.jars`), and later starts take 4 s
less. Prints nothing if the archive exists.
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from duetime.core.errors import error_text
from duetime.local.jars import ClassArchive, pipeline_jars, spark_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from duetime.core.settings import Settings

#: Time limit for the query, and for Java to write the archive as it ends, in seconds.
END_TIMEOUT_S = 180


def write_archive(archive: ClassArchive, directory: Path) -> None:
    """Load what a pipeline loads, end, and keep the archive; `directory` is empty."""
    # Imported here: where there is an archive, none of this is needed.
    from duetime.core.settings import load_settings  # noqa: PLC0415
    from duetime.spark.session import JAVA_OPTIONS, spark_session, stop_jvm  # noqa: PLC0415

    draft = directory / "spark.jsa"
    options = " ".join(archive.write_options(draft))
    settings = load_settings(spark_properties={JAVA_OPTIONS: options}, driver_memory="1g")
    spark = spark_session(settings, pipeline_jars())
    load_classes(spark, settings, directory)
    spark.stop()
    stop_jvm(END_TIMEOUT_S)
    archive.keep(draft)
    archive.remove_others()


def load_classes(spark: "SparkSession", settings: "Settings", directory: Path) -> None:
    """Run a pipeline's steps on no records."""
    from duetime.pipeline.delivery.rows import parsed  # noqa: PLC0415
    from duetime.pipeline.intake.query import Intake  # noqa: PLC0415
    from duetime.pipeline.lanes import route_lane_records  # noqa: PLC0415
    from duetime.spark.kafka_io import RECORD  # noqa: PLC0415

    records = spark.createDataFrame([], RECORD)
    Intake(settings).rows(records).collect()
    route_lane_records(parsed(records), settings).collect()
    # Any streaming query with state that ends by itself.
    (directory / "lines").mkdir()
    (directory / "lines" / "some.txt").write_text("a line")
    lines = spark.readStream.text(str(directory / "lines")).groupBy("value").count()
    query = lines.writeStream.format("noop").outputMode("update").trigger(availableNow=True).start()
    query.awaitTermination(END_TIMEOUT_S)


def main() -> None:
    """Archive Spark's classes, unless that is done. Without it pipelines start later."""
    try:
        with tempfile.TemporaryDirectory(prefix="duetime-training-") as directory:
            archive = spark_archive()
            # Nothing to do where the archive cannot be kept.
            if archive.write_options(Path(directory)) and not archive.exists:
                print("preparing Spark for quicker starts (half a minute) ...", flush=True)
                write_archive(archive, Path(directory))
    except Exception as error:  # noqa: BLE001 (no failure is a reason to stop the set-up)
        print(f"duetime: Spark will start some seconds later than it could: {error_text(error)}")


if __name__ == "__main__":
    main()
