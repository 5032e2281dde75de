"""Why a row cannot be sent, as it knows before the sink.

A sink fails whole on one bad record, and waits a minute for a topic that does not exist. So what
is known of the cluster's topics (`destinations`) is a table that each row looks at: system
properties of the JVM. One property a topic:

    duetime.to.<topic> = <partitions>[:<bytes>][:<marks>]
                         <partitions>:[<bytes>]:[<marks>];<reason>;,<partition>,...;[<partition>]
                         denied                     it may not be written to
                         unknown                    it is gone; as one that has no property

    bytes       if it takes less than we do
    marks       `compacted`; `isolated`, if each of its records is sent by itself
    reason      why some of its partitions take nothing now, then which, then one that does

Pure columns: nobody is asked here.
"""

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime import java
from duetime.config import Settings
from duetime.envelopes import Refusal
from duetime.errors import Reason
from duetime.pipeline.leases import held

#: What a record weighs in a batch of its own besides key, value and headers, in bytes. Source:
#: Kafka's DefaultRecordBatch (61 bytes) and DefaultRecord (at most 22 here).
BATCH_BYTES = 128

UNKNOWN, DENIED, COMPACTED, ISOLATED = "unknown", "denied", "compacted", "isolated"

#: Separates what is known of a topic from what is known of its partitions that take nothing.
STUCK = ";"

#: What keeps a partition from taking records, and what a person can do about it.
STUCK_DETAILS = {
    Reason.NO_LEADER: "the destination's partition has no leader: see that its brokers run",
    Reason.NOT_ENOUGH_REPLICAS: (
        "the destination's partition has fewer replicas in sync than its min.insync.replicas: see "
        "that its brokers run"
    ),
    Reason.NOT_ACKNOWLEDGED: (
        "the destination's brokers did not acknowledge what was sent to it before: see what they "
        "log about it"
    ),
}


def known_of(settings: Settings, topic: Column, cluster: Column) -> Column:
    """What is known of a topic, as the table has it; null for no topic. Runs in executors.

    Of another cluster's, by a table of its own (`duetime@eu.to.<topic>`); what is not known yet,
    because that cluster did not answer yet, is null.

    Select it once, and give the selected column to `obstacles`.
    """
    prefix = _named(settings, cluster, table_name)
    known = java.system_property(F.concat(prefix, F.lit("."), topic))
    return F.when(topic.isNotNull(), F.coalesce(known, java.system_property(prefix)))


def exists(settings: Settings, topic: Column, cluster: Column) -> Column:
    """Whether the cluster has the topic; false where that is not known. Runs in executors."""
    known = known_of(settings, topic, cluster)
    return F.coalesce(known != UNKNOWN, F.lit(False))


def looked_for(settings: Settings, known: Column, topic: Column, cluster: Column) -> Column:
    """A filter for rows, always true: has a topic looked for that is not known.

    Brokers that create topics do so then, and not when the message is due, which would be late.
    """
    asked = _named(settings, cluster, asked_name)
    own = F.concat(asked, F.lit("."), topic)
    # In this order: who hears that there are some finds this one.
    before = F.concat_ws("", *(java.set_system_property(each, topic) for each in (own, asked)))
    is_ours = cluster.isNull() | cluster.isin(*settings.clusters)
    # No topic is called so, but the optimiser does not know.
    return F.when((known == UNKNOWN) & is_ours, before != "..").otherwise(True)


def obstacles(
    known: Column, *, partition: Column, key: Column, size: Column, is_expired: Column
) -> list[Refusal]:
    """Why a row cannot be sent, in the order of the checks. Runs in executors."""
    partitions = F.split_part(known, F.lit(":"), F.lit(1)).cast("int")
    limit = F.split_part(known, F.lit(":"), F.lit(2)).cast("int")
    return [
        Refusal(
            when=is_expired,
            reason=Reason.EXPIRED,
            detail="it could only be delivered after due-expires-ms",
        ),
        Refusal(
            when=known == UNKNOWN,
            reason=Reason.UNKNOWN_TOPIC,
            detail="the destination does not exist: create it, and it is tried again",
        ),
        Refusal(
            when=known == DENIED,
            reason=Reason.NOT_AUTHORISED,
            detail="duetime may not write to the destination: give its user the right",
        ),
        Refusal(
            when=partition >= partitions,
            reason=Reason.NO_SUCH_PARTITION,
            detail="the destination has fewer partitions than due-partition asks for",
        ),
        Refusal(
            when=key.isNull() & known.contains(COMPACTED),
            reason=Reason.NO_KEY,
            detail="the destination is compacted, and takes no message without a key",
        ),
        Refusal(
            when=limit.isNotNull() & (size > limit - BATCH_BYTES),
            reason=Reason.TOO_LARGE_FOR_TOPIC,
            detail="larger than the destination's max.message.bytes: raise it there",
        ),
        *(
            Refusal(
                when=_is_stuck(known, reason, partition, partitions, key),
                reason=reason,
                detail=detail,
            )
            for reason, detail in STUCK_DETAILS.items()
        ),
    ]


def _is_stuck(
    known: Column, reason: Reason, partition: Column, partitions: Column, key: Column
) -> Column:
    """Whether the row is for a partition that takes nothing now, for this reason."""
    # As Kafka's own partitioner chooses (BuiltInPartitioner.partitionForKey).
    by_key = java.murmur2(key).bitwiseAND(0x7FFFFFFF) % partitions
    chosen = F.coalesce(partition, by_key, placed_elsewhere(known, key).cast("int"))
    stuck = F.split_part(known, F.lit(STUCK), F.lit(3))
    # One without a key, of which no partition takes any, is for none of them.
    is_among = F.coalesce(stuck.contains(F.concat(F.lit(","), chosen, F.lit(","))), F.lit(True))
    return F.when(known.contains(f"{STUCK}{reason}{STUCK}"), is_among)


def placed_elsewhere(known: Column, key: Column) -> Column:
    """string: a partition that takes records, for one without a key where some take none."""
    healthy = F.nullif(F.split_part(known, F.lit(STUCK), F.lit(4)), F.lit(""))
    return F.when(known.contains(STUCK) & key.isNull(), healthy)


def is_isolated(known: Column) -> Column:
    """Whether each record for the topic is sent by itself."""
    return F.coalesce(known.contains(ISOLATED), F.lit(False))


def is_reached(settings: Settings) -> Column:
    """A filter for rows: true while the cluster answers, waits a while for it, then raises."""
    return held(reached_name(settings), "the other cluster does not answer")


def table_name(settings: Settings) -> str:
    """How the table's properties begin; the one called so says that the table is there."""
    return f"{settings.namespace}.to"


def asked_name(settings: Settings) -> str:
    """The property that says that a row has looked for topics; `<it>.<topic>` says for which."""
    return f"{settings.namespace}.asked"


def reached_name(settings: Settings) -> str:
    """The lease that says that the cluster answers."""
    return f"{settings.namespace}.reached"


def _named(settings: Settings, cluster: Column, name: Callable[[Settings], str]) -> Column:
    """The name of a property of the row's cluster."""
    found: Column = F.lit(name(settings))
    for each in settings.clusters:
        found = F.when(cluster == each, F.lit(name(settings.at(each)))).otherwise(found)
    return found
