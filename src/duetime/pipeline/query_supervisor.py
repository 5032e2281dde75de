"""Query supervisor: starts the streaming queries, checks them, and restarts them.

A query is restarted from its last commit when it has failed, when its producer has given up a
record, when a topic that it reads was created again, and when one has more partitions. A failed
query rests until no record of it is in flight, and longer after each further failure; the others go
on meanwhile. After a refusal, which is an answer, it does not rest, and after the end of an
executor only until that one can send nothing more.

A producer gives up a record after a refusal, or without an answer. Which it was, the query learns
with its next record from the same partition, and fails. One that has none delivers to all others
until the record can no longer be written.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.streaming import StreamingQuery

from duetime.client.status import RUNS
from duetime.core.clock import doubled_ms
from duetime.core.errors import DuetimeError, error_text
from duetime.core.metrics import QUERY_FAILURES
from duetime.spark.executors import END_S, is_executor_ended
from duetime.spark.kafka_io import RETRY_PAUSE_S

log = logging.getLogger(__name__)

#: Shortest and longest rest of a query that fails, in ms; doubled with each failure.
RESTART_MS, MAX_RESTART_MS = int(RETRY_PAUSE_S * 1_000), 30_000

#: How long a query runs on after its producer has given up records, in seconds: since the last
#: one, which cannot be written any more then, and since the first.
UNANSWERED_S, MAX_UNANSWERED_S = RETRY_PAUSE_S, 3 * RETRY_PAUSE_S

#: Restarts without a long rest that isolate no further destination: if more are needed, refusals or
#: executors are not the cause.
MAX_QUICK_RESTARTS = 3

#: How the errors of Kafka's clients begin. One of a broker's refusals has a place of its own.
KAFKA_ERRORS = (
    "org.apache.kafka.common.errors.",
    "org.apache.kafka.common.InvalidRecordException",
)

#: Errors after which a record may be written later: the broker's answer is not known.
UNKNOWN_OUTCOMES = ("Expiring", "TimeoutException", "NetworkException", "DisconnectException")

#: The error of a query whose producer has given up records.
NOT_DELIVERED = DuetimeError("records could not be delivered in time")

#: Interval between checks of the queries that run, while others are being started, in seconds.
CHECK_INTERVAL_S = 1.0

#: How long the first queries have the cores to themselves at a start, in seconds.
FIRST_S = 30.0

#: Time limit for queries that are just being started, when all are stopped, in seconds.
STOP_TIMEOUT_S = 5.0

#: A query that has run this long has recovered from its failures, in seconds.
RECOVERED_S = 60.0


@dataclass(slots=True)
class GivenUp:
    """The records that a running query's producer has given up; seconds of the monotonic clock."""

    count: int
    first_s: float
    last_s: float
    #: The destinations that are isolated for them.
    blamed: set[str] = field(default_factory=set)

    def is_settled(self) -> bool:
        """Return whether none of them can be written any more."""
        return time.monotonic() - self.last_s >= UNANSWERED_S

    def is_awaited(self) -> bool:
        """Return whether the query runs on: it may yet learn the broker's answer."""
        return not self.is_settled() and time.monotonic() - self.first_s < MAX_UNANSWERED_S


#: Called with each query that is healthy, and its name.
OnHealthy = Callable[[str, StreamingQuery], None]


@dataclass(slots=True)
class SupervisedQuery:
    """A streaming query, and how to start it again."""

    name: str
    start: Callable[[], StreamingQuery]
    #: None until it was started once.
    query: StreamingQuery | None = None
    started_s: float = 0.0
    failures: int = 0
    #: The destinations that were blamed for one of these.
    blamed: set[str] = field(default_factory=set)
    #: How many records its producer had given up when it was started.
    given_up_before: int = 0
    #: Those since then; None where there are none.
    given_up: GivenUp | None = None
    #: How many partitions each topic had when the query was started, of those that may get more.
    partitions: dict[str, int] = field(default_factory=dict)
    #: When it is started again, by the monotonic clock; None while it runs.
    restart_s: float | None = None
    #: Its start, which takes for as long as there is something to recover.
    starting: Future[None] | None = None

    @property
    def is_starting(self) -> bool:
        """True if it is just being started."""
        return self.starting is not None and not self.starting.done()

    def status(self) -> str:
        """Return `runs`, or what keeps it from that."""
        restart_s = self.restart_s
        if restart_s is not None and self.failures:
            left_s = max(0.0, restart_s - time.monotonic())
            return f"failed {self.failures} times, restarts in {left_s:.0f} s"
        return RUNS if self.query and not self.is_starting else "starts"


class QuerySupervisor:
    """Keeps some queries running. Not thread-safe, except `status`."""

    def __init__(  # noqa: PLR0913 (what a restart needs)
        self,
        starts: Mapping[str, Callable[[], StreamingQuery]],
        *,
        refresh: Callable[[], None],
        given_up: Callable[[str], int],
        blame: Callable[[str, Exception], set[str]],
        first: Collection[str] = (),
        remote: Collection[str] = (),
        partitions: Callable[[str], Mapping[str, int]] = lambda _: {},
        drain: Callable[[str], object] = lambda _: None,
        recreated_topics: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`starts` has how each query is started, by its name; `refresh` is called before that.

        `blame` takes a failed query and its error, before it is started again, and returns which
        destinations did not take a record of it: their records go another way from then on.

        `given_up` returns how many records a query's producer could not deliver: Spark asks for
        that with the next record, and an idle query would not fail for minutes. The `first` ones
        are started before the others. Nothing waits for the start of the `remote` ones, which
        deliver to other clusters.

        `partitions` returns how many partitions each topic of a query has that may get more: a
        real-time query reads those that it began its batch with. `drain` waits until what a query
        has sent is acknowledged, so that it is found when it is read back. `recreated_topics` has
        the queries that read a topic which was created again since they were started, and which:
        they would skip records.
        """
        self._queries = [SupervisedQuery(name, start) for name, start in starts.items()]
        for name in starts:
            # Published as 0: Prometheus sees no increase in what begins with a failure.
            QUERY_FAILURES.labels(name)
        self._refresh, self._given_up, self._blame = refresh, given_up, blame
        self._first, self._remote = first, remote
        self._partitions, self._drain = partitions, drain
        self._recreated_topics = recreated_topics
        self._stopping = threading.Event()
        # Each takes seconds in a JVM that has just been started.
        self._pool = ThreadPoolExecutor(len(self._queries), thread_name_prefix="start")

    def start(self, on_healthy: OnHealthy, is_wanted: Callable[[], bool]) -> None:
        """Start the queries; return when all but the remote ones run, or could not be started.

        One may have to recover for minutes: the others are supervised meanwhile, as long as
        `is_wanted` returns true. None is started otherwise: then a later `supervise` does it.
        """

        def check() -> None:
            try:
                if is_wanted():
                    self.supervise(on_healthy)
            except Exception:
                log.exception("could not check the queries, will be repeated")

        first = [each for each in self._queries if each.name in self._first]
        for each in first:
            self._start_soon(each)
        until_s = time.monotonic() + FIRST_S
        while _are_starting(first) and time.monotonic() < until_s:
            check()
        for each in self._queries:
            if each.name not in self._first:
                each.restart_s = time.monotonic()
        check()
        here = [each for each in self._queries if each.name not in self._remote]
        while _are_starting(here):
            check()

    def status(self) -> dict[str, str]:
        """Return the status of each query. From any thread."""
        return {each.name: each.status() for each in self._queries}

    def supervise(self, on_healthy: OnHealthy) -> None:
        """Check each query once: restart it if needed, else call `on_healthy`."""
        recreated = self._recreated_topics()
        for each in self._queries:
            if each.is_starting:
                continue
            if each.restart_s is not None:
                if each.restart_s <= time.monotonic():
                    self._start_soon(each)
            elif each.query:
                self._check(each, each.query, recreated.get(each.name), on_healthy)

    def _check(
        self,
        query: SupervisedQuery,
        running: StreamingQuery,
        recreated: str | None,
        on_healthy: OnHealthy,
    ) -> None:
        """Check a query that runs, of whose topics one may be `recreated`."""
        if error := running.exception():
            self._fail(query, error)
        elif recreated:
            _stop(running)
            self._fail(
                query, DuetimeError(f"topic {recreated} was created again while it was read")
            )
        elif given_up := self._new_given_up(query):
            if not given_up.is_awaited():
                _stop(running)
                self._fail(query, NOT_DELIVERED)
        elif self._has_more_partitions(query):
            query.starting = self._pool.submit(self._restart, query)
        else:
            on_healthy(query.name, running)

    def stop(self) -> None:
        """Stop the queries, and wait until they are."""
        self._stopping.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait([each.starting for each in self._queries if each.starting], timeout=STOP_TIMEOUT_S)
        queries = [each.query for each in self._queries if each.query]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_stop, queries))

    def _start_soon(self, query: SupervisedQuery) -> None:
        query.restart_s, query.started_s = None, time.monotonic()
        query.starting = self._pool.submit(self._start, query)

    def _start(self, query: SupervisedQuery) -> None:
        try:
            if query.query:
                self._await_drained(query)
            # It may have failed for a topic that has changed.
            self._refresh()
            query.given_up_before, query.given_up = self._given_up(query.name), None
            query.partitions = dict(self._partitions(query.name))
            query.query = query.start()
        except Exception as error:  # noqa: BLE001 (whatever it was, it is tried again)
            self._fail(query, error)
        else:
            if self._stopping.is_set():
                # `stop` may have timed out.
                _stop(query.query)

    def _new_given_up(self, query: SupervisedQuery) -> GivenUp | None:
        """Return what its producer has given up since its start; isolate the destinations."""
        count, now_s = self._given_up(query.name), time.monotonic()
        if count > (query.given_up.count if query.given_up else query.given_up_before):
            query.given_up = query.given_up or GivenUp(count, now_s, now_s)
            query.given_up.count, query.given_up.last_s = count, now_s
            query.given_up.blamed |= self._blame(query.name, NOT_DELIVERED)
        return query.given_up

    def _await_drained(self, query: SupervisedQuery) -> None:
        """Wait until nothing that the stopped query has sent can be written any more."""
        before = self._given_up(query.name)
        self._drain(query.name)
        if self._given_up(query.name) > before:
            self._stopping.wait(UNANSWERED_S)

    def _fail(self, query: SupervisedQuery, error: Exception) -> None:
        """Plan a restart, after a rest that the other queries do not make."""
        blamed, given_up = self._blame(query.name, error), query.given_up
        is_safe = bool(blamed) and is_answer(error)
        if given_up:
            # The answer may be another destination's.
            is_one = len(blamed | given_up.blamed) == 1 and is_answer(error)
            is_last = self._given_up(query.name) == given_up.count
            is_safe = is_one or (is_last and given_up.is_settled())
        if time.monotonic() - query.started_s > RECOVERED_S:
            query.failures, query.blamed = 0, set()
        all_blamed = blamed | (given_up.blamed if given_up else set())
        is_ended, is_new = is_executor_ended(error), not all_blamed <= query.blamed
        is_quick = (is_ended or is_safe) and (is_new or query.failures < MAX_QUICK_RESTARTS)
        query.failures, query.blamed = query.failures + 1, query.blamed | all_blamed
        rest_s = doubled_ms(query.failures, RESTART_MS, MAX_RESTART_MS) / 1_000
        if is_quick:
            rest_s = END_S if is_ended else 0.0
        query.restart_s = time.monotonic() + rest_s
        QUERY_FAILURES.labels(query.name).inc()
        why = error_text(error)
        log.error("query failed query=%s restart_s=%.0f error=%s", query.name, rest_s, why)

    def _has_more_partitions(self, query: SupervisedQuery) -> bool:
        has_more = False
        for topic, count in self._partitions(query.name).items():
            if (added := count - query.partitions.setdefault(topic, count)) > 0:
                has_more = True
                log.info(
                    "partitions were added, restarting query=%s topic=%s partitions=%d",
                    query.name,
                    topic,
                    added,
                )
        return has_more

    def _restart(self, query: SupervisedQuery) -> None:
        """End the query's batch and go on: records in flight are read back, and not sent twice."""
        if query.query:
            _stop(query.query)
        self._start(query)


def _are_starting(queries: Collection[SupervisedQuery]) -> bool:
    """Return whether some still are, after a while at most."""
    starting = [each.starting for each in queries if each.starting]
    return bool(wait(starting, timeout=CHECK_INTERVAL_S).not_done)


def is_answer(error: Exception) -> bool:
    """Return whether a broker has refused a record: then it is written at no later time."""
    if isinstance(error, DuetimeError):
        return False
    text = str(error)
    is_kafkas = any(each in text for each in KAFKA_ERRORS)
    return is_kafkas and not any(each in text for each in UNKNOWN_OUTCOMES)


def _stop(query: StreamingQuery) -> None:
    try:
        query.stop()
    except (PySparkException, Py4JJavaError) as error:
        log.warning("query did not stop in time query=%s error=%s", query.name, error_text(error))
