"""Class archive of Spark: `python -m duetime.pipeline.class_archive`, a part of `make setup`.

A pipeline runs on a temporary broker, stops and starts again, so that it also recovers. At the end
Java writes the classes that it has loaded (`duetime.local.jars`), and later starts map them. Prints
nothing if the archive exists.
"""

import logging
import tempfile
from pathlib import Path

from duetime.core.errors import error_text
from duetime.local.jars import ClassArchive, pipeline_jars, spark_archive

#: Time limit for Java to write the archive as it ends, in seconds.
END_TIMEOUT_S = 180

#: How long messages pass through the first pipeline, in seconds.
WARM_UP_S = 10


def write_archive(archive: ClassArchive, directory: Path) -> None:
    """Load what pipelines load, end, and keep the archive; `directory` is empty."""
    # Imported here: where there is an archive, none of this is needed.
    from duetime.core.settings import load_settings  # noqa: PLC0415
    from duetime.kafka.admin import create_topics  # noqa: PLC0415
    from duetime.local.broker import LocalBroker  # noqa: PLC0415
    from duetime.pipeline.service import Pipeline  # noqa: PLC0415
    from duetime.spark.session import JAVA_OPTIONS, stop_jvm  # noqa: PLC0415

    logging.disable()
    draft = directory / "spark.jsa"
    with LocalBroker(directory / "kafka") as broker:
        # A configuration that is found here is for another cluster.
        settings = load_settings(
            bootstrap=broker.bootstrap,
            security_protocol="PLAINTEXT",
            spark_master="",
            store="kafka",
            clusters={},
            checkpoint=(directory / "checkpoint").as_uri(),
            driver_memory="1g",
            spark_properties={JAVA_OPTIONS: " ".join(archive.write_options(draft))},
        )
        create_topics(settings)
        for warm_up_s in (WARM_UP_S, 0):
            own = settings.model_copy(update={"warm_up_seconds": warm_up_s})
            with Pipeline(own, jars=pipeline_jars()):
                pass
        stop_jvm(END_TIMEOUT_S)
    archive.keep(draft)
    archive.remove_others()


def main() -> None:
    """Archive Spark's classes, unless that is done. Without it pipelines start later."""
    try:
        with tempfile.TemporaryDirectory(prefix="duetime-training-") as directory:
            archive = spark_archive()
            # Nothing to do where the archive cannot be kept.
            if archive.write_options(Path(directory)) and not archive.exists:
                print("preparing Spark for quicker starts (a minute) ...", flush=True)
                write_archive(archive, Path(directory))
    except Exception as error:  # noqa: BLE001 (no failure is a reason to stop the set-up)
        print(f"duetime: Spark will start some seconds later than it could: {error_text(error)}")


if __name__ == "__main__":
    main()
