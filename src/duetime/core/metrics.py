"""Prometheus metrics: of the pipeline on `metrics_port`, of the HTTP API at /metrics.

Counters begin at 0 with the process, as Prometheus expects. Labels have few and known values: names
of queries, kinds of topics, configured queues and clusters; never other topics or messages.
"""

from contextlib import suppress

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, start_http_server

from duetime.core.errors import SetupError
from duetime.core.settings import Settings

# Leadership and release.

#: Registered by `serve` alone: API processes would count as pipelines that do not lead.
IS_LEADER = Gauge(
    "duetime_is_leader", "1 while this pipeline delivers, 0 while it stands by.", registry=None
)
OVERDUE_RELEASED = Counter(
    "duetime_overdue_released_messages", "Messages that the overdue scan released past their time."
)
CANCELLED = Counter(
    "duetime_cancelled_messages", "Messages that were not delivered because of a cancel."
)
PENDING = Gauge(
    "duetime_pending_records",
    "Pending records by level of the wheel, cancels included; set by the leader. Messages in "
    "Aerospike are not counted.",
    ["level"],
)
OVERDUE = Gauge(
    "duetime_overdue_records", "Pending records whose slot is over; NaN where it is unknown."
)
OLDEST_OVERDUE_SECONDS = Gauge(
    "duetime_oldest_overdue_seconds", "Time since the end of the oldest overdue slot, in seconds."
)

# Executors, on a Spark cluster.

EXECUTORS = Gauge("duetime_executors", "Live executors, on a Spark cluster.")
EXECUTOR_SKEW = Gauge(
    "duetime_executor_clock_skew_seconds",
    "How far an executor's clock is from the driver's, at least, in seconds.",
    ["executor"],
)

# Records in and out.

INTAKE = Counter(
    "duetime_intake_records",
    "Records that senders wrote, by contract; those of `control` are cancels, and pause, resume "
    "and stop of schedules.",
    ["contract"],
)
OPEN_TRANSACTION_SECONDS = Gauge(
    "duetime_open_transaction_seconds",
    "Age of the oldest open transaction in an intake topic, by contract, in seconds; or 0.",
    ["contract"],
)
DELIVERED = Counter(
    "duetime_delivered_records",
    "Records sent to destinations, by Kafka's metrics, by cluster (this one has no name).",
    ["cluster"],
)
REJECTED = Counter("duetime_rejected_records", "Records that were rejected.")
FAILED = Counter("duetime_failed_records", "Delivery attempts that failed.")
DEAD = Counter("duetime_dead_records", "Messages that became dead letters.")
UNREADABLE = Counter(
    "duetime_unreadable_records",
    "Records of other services in Aerospike's set that could not be understood and stay there.",
)
DELAYED_REMOVED = Counter(
    "duetime_delayed_removed_records",
    "Records of delayed topics that retention removed before they were delivered.",
)

# Recovery and queries.

READ_BACK_RECORDS = Counter(
    "duetime_recovery_read_records",
    "Records read to find out what was sent before an interruption.",
    ["topics"],
)
READ_BACK_SECONDS = Counter(
    "duetime_recovery_read_seconds", "Time spent on that reading, in seconds.", ["topics"]
)
RECOVERY_SECONDS = Gauge(
    "duetime_recovery_seconds",
    "Time that a query took at its last start to finish its work in flight, in seconds.",
    ["query"],
)
QUERY_BATCH_SECONDS = Gauge(
    "duetime_query_batch_seconds", "Duration of a query's last batch, in seconds.", ["query"]
)
QUERY_FAILURES = Counter(
    "duetime_query_failures", "Failures of a query after which it was to be restarted.", ["query"]
)

# Latency probes.

LATENESS_SECONDS = Histogram(
    "duetime_lateness_seconds",
    "Lateness of the pipeline's probes, by destination cluster (this one has no name) and path: "
    "lanes, store.",
    ["cluster", "path"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
PROBES = Counter(
    "duetime_probes",
    "Probes that Kafka took; as many should arrive, and be measured.",
    ["cluster", "path"],
)
CLOCK_OFFSET_SECONDS = Gauge(
    "duetime_clock_offset_seconds",
    "Offset of the broker's clock to this machine's, by the last probe that was acknowledged "
    "quickly, in seconds.",
)

# Work queues.

QUEUE_IN_FLIGHT = Gauge(
    "duetime_queue_in_flight",
    "Messages of a queue in flight, as of the tracker's last commit.",
    ["queue"],
)
QUEUE_OLDEST_SECONDS = Gauge(
    "duetime_queue_oldest_seconds",
    "Age of the oldest message in flight, in seconds; 0 without one.",
    ["queue"],
)
QUEUE_REDELIVERED = Counter(
    "duetime_queue_redelivered", "Redeliveries of a queue's messages.", ["queue"]
)
QUEUE_DEAD = Counter("duetime_queue_dead", "Messages of a queue that were given up.", ["queue"])
QUEUE_BREAKER = Gauge(
    "duetime_queue_circuit_breaker_state",
    "Readers of a queue in a worker process by state of their circuit breaker: closed, open, "
    "half-open.",
    ["queue", "state"],
)

# The HTTP API.

API_SECONDS = Histogram(
    "duetime_api_request_seconds",
    "Time from a request to the start of its answer, by method and status.",
    ["method", "status"],
)
API_MESSAGES = Counter(
    "duetime_api_messages",
    "Messages that the HTTP API took, by what had them when it answered: kafka, spool.",
    ["to"],
)
API_SPOOLED = Gauge("duetime_api_spooled_messages", "Messages in the HTTP API's spool.")
API_REFUSED = Counter(
    "duetime_api_rejected_messages",
    "Messages that the HTTP API had accepted into its spool, and Kafka refuses for good.",
)


def serve(settings: Settings) -> None:
    """Serve the metrics in a thread, if `metrics_port` is set. Raises SetupError."""
    if settings.metrics_port is None:
        return
    with suppress(ValueError):  # It is registered already.
        REGISTRY.register(IS_LEADER)
    try:
        start_http_server(settings.metrics_port, settings.metrics_host)
    except OSError as error:
        raise SetupError(
            f"metrics cannot be served on {settings.metrics_host}:{settings.metrics_port} "
            f"({error.strerror}): choose another metrics_port"
        ) from error
