"""Any Kafka topic as a work queue in the manner of kmq: each message is acknowledged by itself.

What a worker needs is imported when it is asked for: the tracker and the command line look at
markers and notes alone, and should not wait for the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duetime.kmq.breaker import BreakerPolicy
    from duetime.kmq.message import Message
    from duetime.kmq.queue import Queue

__all__ = ["BreakerPolicy", "Message", "Queue"]

_MODULES = {"BreakerPolicy": "breaker", "Message": "message", "Queue": "queue"}


if not TYPE_CHECKING:  # a checker would take every misspelt name for one of these

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__} has no attribute {name}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
