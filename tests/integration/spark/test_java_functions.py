"""Java's own methods, called for each row by code that Spark compiles."""

import time

from pyspark.sql import functions as F

from duetime.spark import catalyst


def of_rows(spark, column, rows=1):
    return [row.found for row in spark.range(0, rows, 1, 1).select(column.alias("found")).collect()]


def test_clocks_are_the_machines_and_read_for_each_row(spark):
    paused = F.when(catalyst.slept(F.lit(20)), catalyst.current_time_ms())
    before_ms = time.time_ns() // 1_000_000
    read = of_rows(spark, paused, rows=5)
    assert before_ms <= read[0] < read[1] < read[4] <= time.time_ns() // 1_000_000
    began_ns = time.monotonic_ns()
    assert began_ns < of_rows(spark, catalyst.nano_time())[0] < time.monotonic_ns()


def test_property_has_its_last_value_and_is_null_before(spark):
    name = F.concat(F.lit("duetime.test."), F.col("id").cast("string"))
    assert of_rows(spark, catalyst.system_property(name)) == [None]
    assert of_rows(spark, catalyst.set_system_property(name, F.lit("é"))) == [None]
    assert of_rows(spark, catalyst.set_system_property(name, F.lit("b"))) == ["é"]
    assert of_rows(spark, catalyst.system_property(name)) == ["b"]
    assert of_rows(spark, catalyst.system_property(F.lit(None).cast("string"))) == [None]


def test_call_in_a_branch_is_made_only_for_its_rows(spark):
    name = F.lit("duetime.test.branch")
    taken = F.when(F.col("id") == 1, catalyst.set_system_property(name, F.col("id").cast("string")))
    of_rows(spark, taken, rows=3)
    assert of_rows(spark, catalyst.system_property(name)) == ["1"]


def test_steps_with_java_calls_are_compiled_as_one(spark):
    rows = (
        spark.range(3)
        .select(catalyst.current_time_ms().alias("now"))
        .where(catalyst.slept(F.lit(1)))
    )
    plan = rows._jdf.queryExecution().executedPlan()
    assert plan.nodeName().startswith("WholeStageCodegen")
    assert {plan.child().nodeName(), plan.child().child().nodeName()} == {"Filter", "Project"}
