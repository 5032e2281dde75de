"""Default Spark properties, and the options of the JVM."""

import pytest
from py4j.java_gateway import GatewayClient
from py4j.protocol import REFLECTION_COMMAND_NAME
from pyspark.sql import functions as F

from duetime.core.settings import Settings
from duetime.local.jars import spark_archive
from duetime.spark.catalyst import java_class
from duetime.spark.session import default_properties, jvm

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
def test_checkpoint_file_manager_is_set_only_for_a_directory(checkpoint, is_directory):
    found = default_properties(Settings(checkpoint=checkpoint), is_local=True)
    assert (MANAGER in found) == is_directory


def test_spark_knows_what_renames_the_files_of_a_directory(spark):
    name = default_properties(Settings(), is_local=True)[MANAGER]
    assert spark.conf.get(MANAGER) == name
    assert spark._jvm.java.lang.Class.forName(name).getName() == name


def test_jvm_out_of_memory_ends(spark):
    bean = "com.sun.management.HotSpotDiagnosticMXBean"
    java = spark._jvm.java.lang
    diagnostic = java.management.ManagementFactory.getPlatformMXBean(java.Class.forName(bean))
    assert diagnostic.getVMOption("ExitOnOutOfMemoryError").getValue() == "true"


def test_names_of_the_jvm_are_looked_up_once(spark, monkeypatch):
    def use_names():
        F.when(F.lit(1) == F.length(F.lit("a")), F.array(F.lit(2)))
        return java_class(jvm(spark), "java.lang.System").nanoTime()

    first, commands, send = use_names(), [], GatewayClient.send_command

    def recorded(client, command, *args, **named):
        commands.append(command)
        return send(client, command, *args, **named)

    monkeypatch.setattr(GatewayClient, "send_command", recorded)
    assert use_names() > first
    assert commands
    assert not [each for each in commands if each.startswith(REFLECTION_COMMAND_NAME)]


def test_setup_has_archived_the_classes_of_a_pipeline():
    assert spark_archive().exists
