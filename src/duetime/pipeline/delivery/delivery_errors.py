"""Topic metadata as rows see them, and the delivery errors that follow from them.

One bad record fails a whole sink, and a topic that does not exist blocks it for a minute. So the
driver publishes what it knows of the cluster's topics (`destinations`), and each row checks its
destination before it is sent. The table is made of JVM system properties, one a topic:

    duetime.to.<topic> = <partitions>[:<bytes>][:<marks>]
                         <partitions>:[<bytes>]:[<marks>]:<reason>:,<partition>,...:[<partition>]
                         denied                     duetime may not write to it
                         unknown                    it was deleted; same as no property

    bytes       its max.message.bytes, if that is less than duetime may send
    marks       `compacted`; `isolated`, if each of its records is sent by itself
    reason      why some of its partitions take no records now, then those partitions, then one
                partition that takes records

Pure columns, evaluated in executors: nothing is requested from Kafka here.
"""

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.core.errors import Reason
from duetime.core.settings import Settings
from duetime.pipeline.delivery.rows import ErrorCase
from duetime.pipeline.leadership.lease import require_lease
from duetime.spark import catalyst

#: The size of a record in a batch of its own besides key, value and headers, in bytes. Source:
#: Kafka's DefaultRecordBatch (61 bytes) and DefaultRecord (at most 22 here).
BATCH_BYTES = 128

UNKNOWN, DENIED, COMPACTED, ISOLATED = "unknown", "denied", "compacted", "isolated"

#: The fields of an entry, and what separates them.
PARTITIONS, MAX_BYTES, MARKS, STUCK_REASON, STUCK_PARTITIONS, HEALTHY_PARTITION = range(6)
SEPARATOR = ":"

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


def topic_metadata(settings: Settings, topic: Column, cluster: Column) -> Column:
    """array<string>: the fields of the table's entry for a topic; null for no topic.

    Topics of another cluster are in a table of their own (`duetime@eu.to.<topic>`). Those that are
    not in it are null while that cluster does not answer. Select the column once, before it is
    used.
    """
    table = _of_cluster(settings, cluster, table_name)
    entry = catalyst.system_property(F.concat(table, F.lit("."), topic))
    found = F.coalesce(entry, F.nullif(catalyst.system_property(table), F.lit("")))
    return F.when(topic.isNotNull(), F.split(found, SEPARATOR))


def request_metadata(
    settings: Settings, metadata: Column, topic: Column, cluster: Column
) -> Column:
    """boolean, always true: as a filter, it has the driver look up a topic that is unknown.

    Brokers that create topics on request do so then, and not when the message is due.
    """
    flag = _of_cluster(settings, cluster, request_name)
    request = F.concat(flag, F.lit("."), topic)
    # The request before the flag: the driver that sees the flag finds the request.
    before = F.concat_ws(
        "", *(catalyst.set_system_property(each, topic) for each in (request, flag))
    )
    is_configured = cluster.isNull() | cluster.isin(*settings.clusters)
    # No topic is called "..", but the optimiser does not know that.
    return F.when(
        (_field(metadata, PARTITIONS) == UNKNOWN) & is_configured, before != ".."
    ).otherwise(True)


def delivery_errors(
    metadata: Column, *, partition: Column, key: Column, size: Column, is_expired: Column
) -> list[ErrorCase]:
    """Return the errors that are known before a row is sent, in the order of the checks."""
    known = _field(metadata, PARTITIONS)
    partitions, max_bytes = known.cast("int"), _field(metadata, MAX_BYTES).cast("int")
    return [
        ErrorCase(is_expired, Reason.EXPIRED, "it could only be delivered after due-expires-ms"),
        ErrorCase(
            known == UNKNOWN,
            Reason.UNKNOWN_TOPIC,
            "the destination does not exist: create it, and it is tried again",
        ),
        ErrorCase(
            known == DENIED,
            Reason.NOT_AUTHORISED,
            "duetime may not write to the destination: give its user the right",
        ),
        ErrorCase(
            partition >= partitions,
            Reason.NO_SUCH_PARTITION,
            "the destination has fewer partitions than due-partition asks for",
        ),
        ErrorCase(
            key.isNull() & _field(metadata, MARKS).contains(COMPACTED),
            Reason.NO_KEY,
            "the destination is compacted, and takes no message without a key",
        ),
        ErrorCase(
            max_bytes.isNotNull() & (size > max_bytes - BATCH_BYTES),
            Reason.TOO_LARGE_FOR_TOPIC,
            "larger than the destination's max.message.bytes: raise it there",
        ),
        ErrorCase(_is_stuck(metadata, partition, partitions, key), *_stuck(metadata)),
    ]


def _stuck(metadata: Column) -> tuple[Column, Column]:
    """Return the reason why partitions of a topic are stuck, and its detail."""
    reason = _field(metadata, STUCK_REASON)
    details = [F.when(reason == str(each), text) for each, text in STUCK_DETAILS.items()]
    return reason, F.coalesce(*details)


def _is_stuck(metadata: Column, partition: Column, partitions: Column, key: Column) -> Column:
    """boolean: the row is for a partition that takes no records."""
    # As Kafka's own partitioner chooses (BuiltInPartitioner.partitionForKey).
    by_key = catalyst.murmur2(key).bitwiseAND(0x7FFFFFFF) % partitions
    chosen = F.coalesce(partition, by_key, healthy_partition(metadata, key).cast("int"))
    stuck = _field(metadata, STUCK_PARTITIONS)
    # Without a key, and with no healthy partition, the row is for no partition at all.
    is_among = F.coalesce(stuck.contains(F.concat(F.lit(","), chosen, F.lit(","))), F.lit(True))
    return F.when(_field(metadata, STUCK_REASON).isNotNull(), is_among)


def _field(metadata: Column, position: int) -> Column:
    """string: a field of an entry; null where it ends before."""
    return F.get(metadata, position)


def healthy_partition(metadata: Column, key: Column) -> Column:
    """string: a partition that takes records, for a row without a key; null if all do."""
    return F.when(key.isNull(), F.nullif(_field(metadata, HEALTHY_PARTITION), F.lit("")))


def is_isolated(metadata: Column) -> Column:
    """boolean: each record for the topic is sent by itself."""
    return F.coalesce(_field(metadata, MARKS).contains(ISOLATED), F.lit(False))


def exists(settings: Settings, topic: Column, cluster: Column) -> Column:
    """boolean: the cluster is known to have the topic."""
    known = _field(topic_metadata(settings, topic, cluster), PARTITIONS)
    return F.coalesce(known != UNKNOWN, F.lit(False))


def is_reached(settings: Settings) -> Column:
    """boolean, as a filter: true while the cluster answers; waits a while for it, then raises."""
    return require_lease(reached_name(settings), "the other cluster does not answer")


def table_name(settings: Settings) -> str:
    """Return the prefix of the table's properties; a property of this name says it is complete."""
    return f"{settings.namespace}.to"


def request_name(settings: Settings) -> str:
    """Return the property that flags requests for topics; `<name>.<topic>` is such a request."""
    return f"{settings.namespace}.asked"


def reached_name(settings: Settings) -> str:
    """Return the lease that is held while the cluster answers."""
    return f"{settings.namespace}.reached"


def _of_cluster(settings: Settings, cluster: Column, name: Callable[[Settings], str]) -> Column:
    """string: the name of a property of the row's cluster."""
    found: Column = F.lit(name(settings))
    for each in settings.clusters:
        found = F.when(cluster == each, F.lit(name(settings.at(each)))).otherwise(found)
    return found
