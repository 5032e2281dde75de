"""How far a message has come: the order of its records in duetime's own topics.

A message goes down the levels of the wheel, then down the lanes, then to its destination, to an
outbox or to what has failed, and from there it begins again with one attempt more. Timestamps alone
do not tell that order: two records of one message may be milliseconds apart, and on two brokers,
whose clocks differ by more.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.columns import state_number, waiting_text
from duetime.config import Settings
from duetime.message import DUE_STATE
from duetime.topics import TopicNames

#: More than there are stages in one attempt.
ATTEMPT = 1_000

#: Where nothing goes on from.
END = 2**62


def progress(settings: Settings) -> Column:
    """bigint, of a record with topic, partition and headers; greater is further. In executors."""
    names, levels, lanes = TopicNames(settings), settings.wheel_levels, settings.ladder.lanes
    topic = F.col("topic")
    # The first is the default: what waits in another store has been nowhere else.
    stage = F.lit(0)
    for level in range(levels):
        stage = F.when(topic == names.wheel(level), levels - level).otherwise(stage)
    stage = F.when(topic == names.lanes, levels + lanes - F.col("partition")).otherwise(stage)
    last = levels + lanes + 1
    outboxes = [names.outbox(each) for each in settings.clusters]
    stage = F.when(topic.isin(*outboxes, names.sending), last).otherwise(stage)
    stage = F.when(topic == names.isolated, last + 1).otherwise(stage)
    stage = F.when(topic == names.failed, last + 2).otherwise(stage)
    attempts = state_number(waiting_text(F.col("headers"), DUE_STATE), "attempts")
    within = F.coalesce(attempts, F.lit(0)) * ATTEMPT + stage
    return F.when(topic.isin(names.dead, names.rejected), F.lit(END)).otherwise(within)
