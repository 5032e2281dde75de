"""The library of an application: schedule, cancel, reschedule, retry and inspect messages.

`Producer` writes to Kafka. `Client` and `AsyncClient` use the HTTP API of `duetime api`.
`retry_later` retries the work of a consumer. The functions answer once the outcome is certain. None
of this needs Spark.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from duetime.client.cancellation import cancel_and_confirm
from duetime.client.consumer_retries import exponential, retry_later
from duetime.client.producer import OnDelivery, Producer
from duetime.client.rescheduling import reschedule
from duetime.client.schedules import (
    find_schedule,
    list_schedules,
    pause_schedule,
    resume_schedule,
    stop_schedule,
)

if TYPE_CHECKING:
    from duetime.client.http import AsyncClient
    from duetime.client.http_sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "OnDelivery",
    "Producer",
    "cancel_and_confirm",
    "exponential",
    "find_schedule",
    "list_schedules",
    "pause_schedule",
    "reschedule",
    "resume_schedule",
    "retry_later",
    "stop_schedule",
]


if not TYPE_CHECKING:  # a type checker would accept any misspelt name

    def __getattr__(name: str) -> object:
        # Importing httpx takes longer than all of the above, and most applications do not use it.
        if name == "AsyncClient":
            return import_module("duetime.client.http").AsyncClient
        if name == "Client":
            return import_module("duetime.client.http_sync").Client
        raise AttributeError(f"module {__name__} has no attribute {name}")
