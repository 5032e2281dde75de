"""Single records by exact partition and offset, as DataFrames: read by executors, in few reads."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise

from pyspark.sql import DataFrame, SparkSession

from duetime.config import Settings
from duetime.errors import KafkaError
from duetime.pipeline.kafka import RECORD, read_ranges
from duetime.stores import OffsetRange
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place

#: So many records between two that are wanted are read over rather than left out: a further read
#: costs as much.
GAP = 5_000

#: The most reads of one partition: wider gaps are read over then.
MOST_READS = 16


def before_end(offsets: Offsets, wanted: Mapping[Place, Iterable[int]]) -> dict[Place, list[int]]:
    """Those of the offsets, by partitions that there are, at which there may be a record.

    For others Spark waits minutes, and fails. Raises KafkaError, also where a topic is missing:
    that may pass, and its messages are not gone before somebody says so.
    """
    places: list[Place] = []
    for topic in sorted({topic for topic, _ in wanted}):
        if not (found := offsets.readable_places(topic)):
            raise KafkaError(
                f"topic {topic} is missing, and has open messages: create it, or take it out of "
                "queues"
            )
        places += [place for place in found if place in wanted]
    ends = offsets.ends(places)
    return {place: [each for each in wanted[place] if each < ends[place]] for place in places}


def fetch(
    spark: SparkSession, settings: Settings, wanted: Mapping[Place, Iterable[int]]
) -> DataFrame:
    """At least the records at these offsets that are there; whoever asks, joins."""
    found = [read_ranges(spark, settings, ranges, all_there=False) for ranges in reads(wanted)]
    return reduce(DataFrame.unionAll, found or [spark.createDataFrame([], RECORD)])


def reads(wanted: Mapping[Place, Iterable[int]]) -> list[list[OffsetRange]]:
    """Ranges that have these offsets; those of one read are of different partitions."""
    by_place = [
        [OffsetRange(*place, start, end) for start, end in _runs(sorted(offsets))]
        for place, offsets in wanted.items()
    ]
    most = max(map(len, by_place), default=0)
    return [[runs[nth] for runs in by_place if nth < len(runs)] for nth in range(most)]


def _runs(ordered: Sequence[int]) -> list[tuple[int, int]]:
    gaps = sorted(after - each for each, after in pairwise(ordered))
    widest = max(GAP, gaps[-MOST_READS] if len(gaps) >= MOST_READS else 0)
    runs: list[tuple[int, int]] = []
    for each in ordered:
        if runs and each - runs[-1][1] < widest:
            runs[-1] = runs[-1][0], each + 1
        else:
            runs.append((each, each + 1))
    return runs
