"""Spark's classes are archived: `python -m duetime.pipeline.training`, a part of `make setup`.

A session does what each pipeline does at its start, on no records, and ends as it should: then Java
writes what it has loaded (`duetime.local.startup`). Says nothing where that is done already.
"""

import tempfile
from pathlib import Path

from duetime.errors import words
from duetime.local.startup import ClassArchive, spark_archive

#: How long the query may take, and Java to end, which is when it writes, in seconds.
END_S = 180


def train(archive: ClassArchive, directory: Path) -> None:
    """Load what a pipeline loads, end, and keep the archive; `directory` is an empty one."""
    # Here and not above: where there is an archive, nothing of this is needed.
    from duetime.config import load_settings  # noqa: PLC0415
    from duetime.local.jars import pipeline_jars  # noqa: PLC0415
    from duetime.pipeline.intake import Intake  # noqa: PLC0415
    from duetime.pipeline.jvm import end_well  # noqa: PLC0415
    from duetime.pipeline.kafka import RECORD  # noqa: PLC0415
    from duetime.pipeline.lanes import looked_at_again  # noqa: PLC0415
    from duetime.pipeline.session import JAVA_OPTIONS, spark_session  # noqa: PLC0415

    draft = directory / "spark.jsa"
    options = " ".join(archive.write_options(draft))
    settings = load_settings(spark_properties={JAVA_OPTIONS: options}, driver_memory="1g")
    spark = spark_session(settings, pipeline_jars())
    records = spark.createDataFrame([], RECORD)
    Intake(settings).rows(records).collect()
    looked_at_again(records, settings).collect()
    # A streaming query with state, of whatever it is, that ends by itself.
    (directory / "lines").mkdir()
    (directory / "lines" / "some.txt").write_text("a line")
    lines = spark.readStream.text(str(directory / "lines")).groupBy("value").count()
    query = lines.writeStream.format("noop").outputMode("update").trigger(availableNow=True).start()
    query.awaitTermination(END_S)
    spark.stop()
    end_well(END_S)
    archive.keep(draft)
    archive.remove_others()


def main() -> None:
    """Archive Spark's classes, unless that is done. Everything works without, only later."""
    try:
        with tempfile.TemporaryDirectory(prefix="duetime-training-") as directory:
            archive = spark_archive()
            # Where nothing can be kept there is nothing to do.
            if archive.write_options(Path(directory)) and not archive.exists:
                print("preparing Spark for quicker starts (half a minute) ...", flush=True)
                train(archive, Path(directory))
    except Exception as error:  # noqa: BLE001 (whatever it was, it is no reason to stop here)
        print(f"duetime: Spark will start some seconds later than it could: {words(error)}")


if __name__ == "__main__":
    main()
