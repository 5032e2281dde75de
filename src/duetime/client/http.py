"""The asyncio client of the HTTP API, and what it has in common with the blocking one.

    async with AsyncClient("http://127.0.0.1:8080") as client:
        message = await client.schedule("orders", {"order": 17}, in_=timedelta(seconds=10))
        await client.cancel(message.id)

`Client` is generated from `AsyncClient` by `tools/unasync.py`, into `http_sync.py`. Answers are the
models of `http_models`.

A message gets its id and its due time before the first try, so that the API recognises a repeated
request. Every call raises KafkaError where the API or its Kafka does not answer, Refused for a
problem without an error of its own, and InvalidMessage for invalid arguments.
"""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from duetime.client.http_models import (
    Accepted,
    AcceptedMany,
    DeadLetterDetail,
    DeadLetterList,
    DeadLetterSummary,
    MessagePage,
    MessageSummary,
    PendingCounts,
    PipelineStatus,
    RedriveCount,
    RejectedDetail,
    RejectedList,
    RejectedSummary,
    Scheduled,
    ScheduledMessage,
    ScheduleList,
    ScheduleSummary,
)
from duetime.core.clock import SystemClock, format_instant, instant_ms
from duetime.core.errors import (
    ConfigError,
    InvalidMessage,
    KafkaError,
    Reason,
    Refused,
    TooLate,
    UnknownMessage,
)
from duetime.core.messages import SCHEDULE_PATTERN, MessageId
from duetime.core.records import Headers, due_time_ms, new_unique

#: The number of tries of a request that is safe to repeat.
MAX_TRIES = 5

#: The delay before the second try, in seconds; each further one is twice as long.
RETRY_DELAY_S = 0.2

#: The longest delay that a Retry-After header may ask for, in seconds.
MAX_RETRY_AFTER_S = 30.0

#: In seconds. Reading takes longer than the API's `api_request_timeout_seconds` and than its waits
#: for Kafka and the pipeline; an unreachable API is noticed sooner.
TIMEOUT = httpx.Timeout(35.0, connect=5.0)

#: Statuses after which another try may succeed.
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})

AnswerT = TypeVar("AnswerT", bound=BaseModel)


class MessageOptions(TypedDict, total=False):
    """The optional parts of a message that is scheduled."""

    key: str | bytes | None
    #: By name; or as pairs, where a name occurs twice.
    headers: Headers
    at: datetime
    in_: timedelta
    id: str
    partition: int
    cluster: str
    #: Makes a schedule: `id` is its name, and `at` or `in_` its optional start.
    cron: str
    #: The time zone of `cron`.
    zone: str
    #: The end of the schedule: no run is later.
    until: datetime
    #: The treatment of missed runs: `skip`, `once` or `all`.
    misfire: str


class MessageQuery(TypedDict, total=False):
    """The conditions of a list of messages; all of them hold."""

    topic: str
    key: str
    #: Due at this instant or later.
    from_: datetime
    #: Due before this instant.
    to: datetime
    #: Only messages that failed and are retried.
    failed: bool


class DeadLetterQuery(TypedDict, total=False):
    """The conditions of a list of dead letters; all of them hold."""

    topic: str
    reason: str
    #: Failed for the last time at this instant or later.
    since: datetime


class RedriveQuery(DeadLetterQuery, total=False):
    """The conditions of a redrive; `all` selects every dead letter."""

    offsets: Sequence[int]
    all: bool


class AsyncClient:
    """A client for asyncio. Options are httpx's, such as `verify` and `timeout`.

    Raises ConfigError for an invalid address.
    """

    def __init__(self, base_url: str, *, token: str | None = None, **options: Any) -> None:  # noqa: ANN401 (httpx's own)
        check_base_url(base_url)
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            **{"timeout": TIMEOUT, **options},
        )

    async def schedule(
        self, topic: str, value: object = None, **parts: Unpack[MessageOptions]
    ) -> Scheduled:
        """Schedule a message; text and bytes are sent as they are, anything else as JSON.

        After KafkaError it may have been accepted: send it again with the same id.
        """
        return (await self.schedule_many([(topic, value, parts)]))[0]

    async def schedule_many(
        self, messages: Sequence[tuple[str, object, MessageOptions]]
    ) -> list[Scheduled]:
        """Schedule several messages (topic, value, other parts), all or none, as `schedule`."""
        wanted = [message_json(*each) for each in messages]
        response = await self._request("POST", "/v1/messages", body=wanted)
        accepted = read(AcceptedMany, response).messages
        if len(accepted) != len(wanted):
            raise foreign_answer(response)
        in_kafka = response.status_code == httpx.codes.CREATED
        return [Scheduled(id=each.id, in_kafka=in_kafka) for each in accepted]

    async def find(self, id: str, *, retry_ms: int | None = None) -> ScheduledMessage:  # noqa: A002 (the field's name)
        """Return a scheduled message; one that failed is found by its `due_at_ms` as `retry_ms`.

        Raises UnknownMessage, TooLate.
        """
        return await self._get(ScheduledMessage, message_path(id), retry_ms=retry_ms)

    async def cancel(self, id: str) -> None:  # noqa: A002 (the field's name)
        """Cancel a message, and return when that is certain. Raises UnknownMessage, TooLate."""
        await self._delete(message_path(id))

    async def reschedule(
        self,
        id: str,  # noqa: A002 (the field's name)
        *,
        at: datetime | None = None,
        in_: timedelta | None = None,
    ) -> str:
        """Change the due time, and return the new id. Raises UnknownMessage, TooLate."""
        due = format_instant(due_time_ms(at, in_, SystemClock().now_ms()))
        path = f"{message_path(id)}/reschedule"
        # A repeated request would fail after a success, because the old id is gone.
        return (await self._post(Accepted, path, body={"at": due}, max_tries=1)).id

    async def deliver_now(self, id: str) -> str:  # noqa: A002 (the field's name)
        """Deliver a message at once, and return its new id. Raises UnknownMessage, TooLate."""
        path = f"{message_path(id)}/deliver-now"
        return (await self._post(Accepted, path, max_tries=1)).id

    async def messages(self, **which: Unpack[MessageQuery]) -> AsyncIterator[MessageSummary]:
        """Iterate over the scheduled messages by due time, page by page, without payloads."""
        page = await self._get(MessagePage, "/v1/messages", **which)
        while page.cursor:
            for each in page.messages:
                yield each
            page = await self._get(MessagePage, "/v1/messages", **which, cursor=page.cursor)
        for each in page.messages:
            yield each

    async def pending(
        self, *, from_: datetime | None = None, to: datetime | None = None
    ) -> PendingCounts:
        """Count the pending records by slot, from offsets alone."""
        return await self._get(PendingCounts, "/v1/pending", from_=from_, to=to)

    async def status(self) -> PipelineStatus:
        """Return the leader, the standbys, and what is late."""
        return await self._get(PipelineStatus, "/v1/status")

    async def schedules(self) -> list[ScheduleSummary]:
        """Return all schedules by name; `schedule` with `cron` makes one."""
        return (await self._get(ScheduleList, "/v1/schedules")).schedules

    async def find_schedule(self, name: str) -> ScheduleSummary:
        """Return one schedule. Raises UnknownMessage."""
        return await self._get(ScheduleSummary, schedule_path(name))

    async def pause_schedule(self, name: str) -> ScheduleSummary:
        """Skip all runs until it is resumed. Raises UnknownMessage."""
        return await self._post(ScheduleSummary, f"{schedule_path(name)}/pause")

    async def resume_schedule(self, name: str) -> ScheduleSummary:
        """Continue with the next run. Raises UnknownMessage."""
        return await self._post(ScheduleSummary, f"{schedule_path(name)}/resume")

    async def stop_schedule(self, name: str) -> None:
        """End a schedule. Raises UnknownMessage, also where a try without an answer ended it."""
        await self._delete(schedule_path(name))

    async def dead_letters(
        self, *, limit: int = 50, **which: Unpack[DeadLetterQuery]
    ) -> list[DeadLetterSummary]:
        """Return the latest dead letters, oldest first, without payloads."""
        page = await self._get(DeadLetterList, "/v1/dead-letters", **which, limit=limit)
        return page.letters

    async def dead_letter(self, offset: int) -> DeadLetterDetail:
        """Return one dead letter. Raises UnknownMessage."""
        return await self._get(DeadLetterDetail, f"/v1/dead-letters/{offset}")

    async def redrive(self, **which: Unpack[RedriveQuery]) -> int:
        """Redrive dead letters, each once, and return how many; InvalidMessage without a filter.

        After a repeated try it is the number of the last one.
        """
        path = "/v1/dead-letters/redrive"
        return (await self._post(RedriveCount, path, body=as_json(which))).redriven

    async def rejected_records(self, *, limit: int = 50) -> list[RejectedSummary]:
        """Return the latest records that the intake rejected, oldest first, without payloads."""
        return (await self._get(RejectedList, "/v1/rejected", limit=limit)).records

    async def rejected_record(self, offset: int) -> RejectedDetail:
        """Return one rejected record. Raises UnknownMessage."""
        return await self._get(RejectedDetail, f"/v1/rejected/{offset}")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _get(self, kind: type[AnswerT], path: str, **query: object) -> AnswerT:
        return read(kind, await self._request("GET", path, query=query))

    async def _post(
        self, kind: type[AnswerT], path: str, *, body: object = None, max_tries: int = MAX_TRIES
    ) -> AnswerT:
        return read(kind, await self._request("POST", path, body=body, max_tries=max_tries))

    async def _delete(self, path: str) -> None:
        response = await self._request("DELETE", path)
        if response.status_code != httpx.codes.NO_CONTENT:
            raise foreign_answer(response)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, object] | None = None,
        max_tries: int = MAX_TRIES,
    ) -> httpx.Response:
        """Return the successful response, or raise the error of the problem."""
        request = self._http.build_request(
            method, path, params=as_json(query or {}), **json_content(body)
        )
        response = await self._request_with_retries(request, max_tries)
        raise_for_problem(response)
        return response

    async def _request_with_retries(self, request: httpx.Request, max_tries: int) -> httpx.Response:
        """Repeat the request until its answer is final. Raises KafkaError without an answer."""
        for tried in range(1, max_tries + 1):
            try:
                response = await self._http.send(request)
            except httpx.TransportError as error:
                if tried == max_tries:
                    raise no_answer(request, error) from error
                await asyncio.sleep(retry_delay_s(tried))
            else:
                if tried == max_tries or response.status_code not in RETRYABLE_STATUSES:
                    break
                await asyncio.sleep(retry_delay_s(tried, response))
        return response


def check_base_url(base_url: str) -> None:
    """Raise ConfigError unless it is an HTTP address."""
    try:
        url = httpx.URL(base_url)
        is_valid = url.scheme in ("http", "https") and bool(url.host)
    except (httpx.InvalidURL, TypeError):
        is_valid = False
    if not is_valid:
        # The address is not repeated: it may contain a password.
        raise ConfigError("base_url is no address: write it as http://127.0.0.1:8080")


def message_path(id: str) -> str:  # noqa: A002 (the field's name)
    """Return the path of a message. Raises InvalidMessage (bad-id)."""
    return f"/v1/messages/{quote(str(MessageId.parse(id)), safe='')}"


def schedule_path(name: str) -> str:
    """Return the path of a schedule. Raises InvalidMessage (bad-id)."""
    # A path of one or two dots would be resolved to its parent.
    if not re.match(SCHEDULE_PATTERN, name) or name in {".", ".."}:
        raise InvalidMessage(
            Reason.BAD_ID,
            f"{name!r} is no schedule's name that HTTP can ask for: it is 1 to 160 letters, digits "
            "and . _ : = ~ + @ -",
        )
    return f"/v1/schedules/{quote(name, safe='')}"


def message_json(topic: str, value: object, parts: MessageOptions) -> dict[str, Any]:
    """Return the JSON of a message, with a due time and an id."""
    names = ("partition", "cluster", "cron", "zone", "until", "misfire")
    return {
        "topic": topic,
        "id": parts.get("id") or new_unique(),
        **_due(parts),
        **_payload("value", value),
        **_payload("key", parts.get("key")),
        "headers": _headers(parts.get("headers", ())),
        **as_json({name: parts.get(name) for name in names}),
    }


def _due(parts: MessageOptions) -> dict[str, str]:
    at, in_ = parts.get("at"), parts.get("in_")
    if "cron" in parts and at is None and in_ is None:
        return {}
    return {"at": format_instant(due_time_ms(at, in_, SystemClock().now_ms()))}


def _payload(name: str, value: object) -> dict[str, object]:
    if isinstance(value, bytes):
        return {f"{name}_base64": base64.b64encode(value).decode()}
    return {name: value}


def _headers(headers: Headers) -> list[dict[str, object]]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [{"name": name, **_payload("value", value)} for name, value in pairs]


def as_json(fields: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields as the API names them, with instants as text and without None."""
    return {
        name.rstrip("_"): format_instant(instant_ms(value))
        if isinstance(value, datetime)
        else value
        for name, value in fields.items()
        if value is not None
    }


def json_content(value: object) -> dict[str, Any]:
    """Return httpx's arguments for a JSON body. Raises InvalidMessage for what JSON cannot hold."""
    if value is None:
        return {}
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        content = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        # The text of other errors may contain the value.
        kind = f" ({error})" if type(error) is TypeError else ""
        raise InvalidMessage(
            Reason.MALFORMED,
            f"JSON cannot hold the message{kind}: give text or bytes, or what json.dumps "
            "takes, without NaN",
        ) from None
    return {"content": content, "headers": {"Content-Type": "application/json"}}


def retry_delay_s(tried: int, response: httpx.Response | None = None) -> float:
    """Return the delay after `tried` attempts, in seconds; Retry-After comes first."""
    retry_after = "" if response is None else response.headers.get("retry-after", "")
    if retry_after.isdecimal():
        return min(float(retry_after), MAX_RETRY_AFTER_S)
    return float(RETRY_DELAY_S * 2 ** (tried - 1))


def no_answer(request: httpx.Request, error: httpx.TransportError) -> KafkaError:
    """Return the error for a request without an answer."""
    unknown = "" if request.method == "GET" else ", and it is not known whether it did"
    return KafkaError(f"duetime api does not answer ({error}): see that it runs there{unknown}")


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the error that a problem (RFC 9457) stands for."""
    if response.is_success:
        return
    try:
        problem = response.json()
        reason, detail = str(problem["reason"]), str(problem["detail"])
    except (ValueError, TypeError, KeyError):
        raise foreign_answer(response) from None
    for kind in (UnknownMessage, TooLate, KafkaError):
        if reason == kind.reason:
            raise kind(detail)
    if reason in tuple(Reason):
        raise InvalidMessage(Reason(reason), detail)
    raise Refused(reason, detail)


def read(kind: type[AnswerT], response: httpx.Response) -> AnswerT:
    """Parse an answer. Raises Refused where it is no answer of duetime."""
    try:
        return kind.model_validate_json(response.content)
    except ValidationError:
        raise foreign_answer(response) from None


def foreign_answer(response: httpx.Response) -> Refused:
    """Return the error for an answer that duetime does not give: a proxy may be in front of it."""
    return Refused("error", f"the answer was {response.status_code}: is it duetime?")
