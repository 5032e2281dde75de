"""Java's own methods, called for each row by code that Spark compiles."""

import time

import pytest
from pyspark.sql import functions as F

from duetime import java

pytestmark = pytest.mark.system


def of_rows(spark, column, rows=1):
    return [row.found for row in spark.range(0, rows, 1, 1).select(column.alias("found")).collect()]


def test_the_clocks_are_those_of_this_machine_and_read_for_each_row(spark):
    paused = F.when(java.slept(F.lit(20)), java.current_time_ms())
    before_ms = time.time_ns() // 1_000_000
    read = of_rows(spark, paused, rows=5)
    assert before_ms <= read[0] < read[1] < read[4] <= time.time_ns() // 1_000_000
    began_ns = time.monotonic_ns()
    assert began_ns < of_rows(spark, java.nano_time())[0] < time.monotonic_ns()


def test_a_property_is_what_was_set_last_and_null_before(spark):
    name = F.concat(F.lit("duetime.test."), F.col("id").cast("string"))
    assert of_rows(spark, java.system_property(name)) == [None]
    assert of_rows(spark, java.set_system_property(name, F.lit("é"))) == [None]
    assert of_rows(spark, java.set_system_property(name, F.lit("b"))) == ["é"]
    assert of_rows(spark, java.system_property(name)) == ["b"]
    assert of_rows(spark, java.system_property(F.lit(None).cast("string"))) == [None]


def test_a_call_in_a_branch_is_made_for_the_rows_that_take_it(spark):
    name = F.lit("duetime.test.branch")
    taken = F.when(F.col("id") == 1, java.set_system_property(name, F.col("id").cast("string")))
    of_rows(spark, taken, rows=3)
    assert of_rows(spark, java.system_property(name)) == ["1"]


def test_steps_with_such_calls_are_compiled_as_one(spark):
    rows = spark.range(3).select(java.current_time_ms().alias("now")).where(java.slept(F.lit(1)))
    plan = rows._jdf.queryExecution().executedPlan()
    assert plan.nodeName().startswith("WholeStageCodegen")
    assert {plan.child().nodeName(), plan.child().child().nodeName()} == {"Filter", "Project"}
