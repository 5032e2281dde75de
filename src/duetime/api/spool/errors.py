"""Why something is not in the spool, or does not leave it."""

import sqlite3

from duetime.errors import DuetimeError


class NotKept(DuetimeError):
    """The spool has not taken what Kafka did not acknowledge."""


class SpoolFull(NotKept):
    """Kafka does not answer, and there is no room for more in the spool or on its disk."""

    reason = "spool-full"


class SpoolFailed(NotKept):
    """The spool's file cannot be read or written, or what is in it cannot be sent."""

    reason = "spool-failed"


class SpoolForeign(SpoolFailed):
    """What is in the spool is for another Kafka.

    `is_certain` is whether it is known to be another, and not only which one it is.
    """

    def __init__(self, detail: str, *, is_certain: bool = True) -> None:
        super().__init__(detail)
        self.is_certain = is_certain


def failed(error: sqlite3.Error) -> SpoolFailed:
    """The error for what SQLite says; none of its words are of a message."""
    return SpoolFailed(f"the spool's file cannot be used ({error}): see its disk, and api_spool")
