"""What Prometheus may ask a pipeline for, on `metrics_port`, and the HTTP API at /metrics.

Counters begin at 0 with the process, as Prometheus expects. Labels are few and known: names of
queries, of kinds of topics and of configured queues and clusters, never of other topics or of
messages.
"""

from contextlib import suppress

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, start_http_server

from duetime.config import Settings
from duetime.errors import SetupError

#: Not told by processes that are no pipelines: what sums it up would count a group of API processes
#: as pipelines of which none leads.
LEADING = Gauge(
    "duetime_leading", "1 while this pipeline delivers, 0 while it stands by.", registry=None
)

RESCUED = Counter(
    "duetime_rescued_messages", "Messages that were past due before a window took them up."
)

UNREADABLE = Counter(
    "duetime_unreadable_records",
    "Records of other services in Aerospike's set that could not be understood and stay there.",
)

READ_BACK_RECORDS = Counter(
    "duetime_read_back_records",
    "Records read back, to know what was sent before an interruption.",
    ["topics"],
)

READ_BACK_SECONDS = Counter(
    "duetime_read_back_seconds", "How long reading back took, in seconds.", ["topics"]
)

RECOVERY_SECONDS = Gauge(
    "duetime_recovery_seconds",
    "How long a query took to finish what it had in flight when it was last begun, in seconds.",
    ["query"],
)

LATENESS_SECONDS = Histogram(
    "duetime_lateness_seconds",
    "How late the pipeline's own probes arrive, by the cluster where they do (this one has no "
    "name) and the way they take: lanes, store.",
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
    "How far the broker's clock is ahead of this machine's, by the last probe that was "
    "acknowledged quickly, in seconds.",
)

PENDING = Gauge(
    "duetime_pending_records",
    "Records that wait, by level of the wheel, cancels included; told by the one that leads. Not "
    "what waits in Aerospike.",
    ["level"],
)

OVERDUE = Gauge(
    "duetime_overdue_records", "Those of them whose slot is over; NaN where nobody knows."
)

OLDEST_OVERDUE_SECONDS = Gauge(
    "duetime_oldest_overdue_seconds", "For how long the oldest slot of those is over, in seconds."
)

INTAKE = Counter(
    "duetime_intake_records",
    "Records that senders wrote, by contract; those of `control` are cancels, and what was asked "
    "of series: pause, resume, stop.",
    ["contract"],
)

OPEN_TRANSACTION_SECONDS = Gauge(
    "duetime_open_transaction_seconds",
    "For how long the oldest open transaction in an intake topic is open, by contract, in seconds; "
    "0 where there is none.",
    ["contract"],
)

DELIVERED = Counter(
    "duetime_delivered_records",
    "Records sent to destinations, by Kafka's metrics and by their cluster (this one has no name).",
    ["cluster"],
)

REJECTED = Counter("duetime_rejected_records", "Records that were rejected.")

CANCELLED = Counter(
    "duetime_cancelled_messages", "Messages that were left out because they had been cancelled."
)

FAILED = Counter("duetime_failed_records", "Tries to deliver that failed.")

DEAD = Counter("duetime_dead_records", "Messages that became dead letters.")

QUERY_BATCH_SECONDS = Gauge(
    "duetime_query_batch_seconds", "How long a query's last batch took, in seconds.", ["query"]
)

QUERY_FAILURES = Counter(
    "duetime_query_failures", "How often a query failed and was to be started again.", ["query"]
)

DELAYED_REMOVED = Counter(
    "duetime_delayed_removed_records",
    "Records of delayed topics that retention removed before they were delivered.",
)

QUEUE_IN_FLIGHT = Gauge(
    "duetime_queue_in_flight",
    "Messages of a queue that somebody works on, by the tracker's last note.",
    ["queue"],
)

QUEUE_OLDEST_SECONDS = Gauge(
    "duetime_queue_oldest_seconds",
    "For how long the oldest of those is worked on, in seconds; 0 where there is none.",
    ["queue"],
)

QUEUE_REDELIVERED = Counter(
    "duetime_queue_redelivered", "Messages of a queue that were delivered again.", ["queue"]
)

QUEUE_DEAD = Counter("duetime_queue_dead", "Messages of a queue that were given up.", ["queue"])

QUEUE_BREAKER = Gauge(
    "duetime_queue_breaker",
    "How many of a worker process's readers of a queue have their circuit breaker in this state: "
    "closed, open, half-open.",
    ["queue", "state"],
)

API_SECONDS = Histogram(
    "duetime_api_request_seconds",
    "How long requests to the HTTP API took until the answer began, by method and status.",
    ["method", "status"],
)

API_MESSAGES = Counter(
    "duetime_api_messages",
    "Messages that the HTTP API took, by what had them when it answered: kafka, spool.",
    ["to"],
)

API_SPOOLED = Gauge("duetime_api_spooled_messages", "Messages in the HTTP API's spool.")

API_REFUSED = Counter(
    "duetime_api_refused_messages",
    "Messages that the HTTP API had accepted into its spool, and Kafka refuses for good.",
)


def serve(settings: Settings) -> None:
    """Answer Prometheus in a thread of its own, if there is a port. Raises SetupError."""
    if settings.metrics_port is None:
        return
    with suppress(ValueError):  # It is there already.
        REGISTRY.register(LEADING)
    try:
        start_http_server(settings.metrics_port, settings.metrics_host)
    except OSError as error:
        raise SetupError(
            f"metrics cannot be served on {settings.metrics_host}:{settings.metrics_port} "
            f"({error.strerror}): choose another metrics_port"
        ) from error
