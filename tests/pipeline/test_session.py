"""What Spark is told, where nobody says otherwise."""

import pytest

from duetime.config import Settings
from duetime.pipeline.session import defaults

MANAGER = "spark.sql.streaming.checkpointFileManagerClass"


@pytest.mark.parametrize(
    ("checkpoint", "is_directory"),
    [
        ("/var/lib/duetime/checkpoint", True),
        ("file:///var/lib/duetime/checkpoint", True),
        ("hdfs://namenode/duetime", False),
        ("s3a://bucket/duetime", False),
    ],
)
def test_how_files_are_renamed_is_said_for_a_directory_only(checkpoint, is_directory):
    found = defaults(Settings(checkpoint=checkpoint), is_local=True)
    assert (MANAGER in found) == is_directory


@pytest.mark.system
def test_spark_knows_what_renames_the_files_of_a_directory(spark):
    name = defaults(Settings(), is_local=True)[MANAGER]
    assert spark.conf.get(MANAGER) == name
    assert spark._jvm.java.lang.Class.forName(name).getName() == name


@pytest.mark.system
def test_a_jvm_that_is_out_of_memory_ends_and_does_not_keep_the_lead(spark):
    bean = "com.sun.management.HotSpotDiagnosticMXBean"
    java = spark._jvm.java.lang
    diagnostic = java.management.ManagementFactory.getPlatformMXBean(java.Class.forName(bean))
    assert diagnostic.getVMOption("ExitOnOutOfMemoryError").getValue() == "true"
