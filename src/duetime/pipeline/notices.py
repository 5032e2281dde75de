"""The notices query: Aerospike says that an id has expired, and its message is taken up.

sender -> intake -> [saving] -> kafka_message_cache      the message, which never expires
                             -> kafka_message_id         its id, which expires when it is due
Aerospike's connector -> as_outbound_msgid_set -> [notices: a turn of what was told] -> destination

A micro-batch query over the connector's topic. A notice names a message, and what is taken up is
what is found under that name: so one that comes twice, or for a message that is gone, changes
nothing, and one that comes early waits in its turn until the message is due. The cached message is
removed when the send is acknowledged. What is never told of, rescue finds.
"""

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pyspark.sql import DataFrame

from duetime.clock import Clock
from duetime.config import Settings
from duetime.stores import Claim

#: What the query, and the directory of its offsets, are called.
NOTICES = "notices"

#: How often a batch is begun.
EVERY = "100 milliseconds"


@dataclass(frozen=True, slots=True)
class Notice:
    """What was told of: by its name, or where the connector has none, by its digest."""

    name: str | None
    digest: bytes | None


class Noticing(Protocol):
    """A store that can be told what is due."""

    def noticed(
        self, names: Sequence[str], digests: Sequence[bytes], until_ms: int
    ) -> Sequence[Claim]:
        """Claim what is there under these names, or had ids with these digests.

        Without what is taken up already, and what is due at `until_ms` or later.
        """
        ...


def notices(
    settings: Settings, store: Noticing, take_up: Callable[[Any], None], clock: Clock
) -> Callable[[DataFrame, int], None]:
    """What to do with each batch of the query. Runs on the driver.

    Safe to repeat: what was delivered is gone. What is due later than the horizon is left to
    rescue, which looks at due times.
    """

    def handle(batch: DataFrame, _number: int) -> None:
        told = deleted((row.key, row.value) for row in batch.select("key", "value").collect())
        names = [each.name for each in told if each.name is not None]
        digests = [each.digest for each in told if each.name is None and each.digest is not None]
        if claims := store.noticed(names, digests, clock.now_ms() + settings.horizon_ms):
            take_up(claims)

    return handle


def deleted(records: Iterable[tuple[bytes | None, bytes | None]]) -> list[Notice]:
    """What these records say was removed, each once; writes and what is no notice are ignored."""
    found = (notice_of(key, value) for key, value in records)
    return list(dict.fromkeys(each for each in found if each))


def notice_of(key: bytes | None, value: bytes | None) -> Notice | None:
    """The notice of a removal in flat JSON; None of anything else."""
    try:
        metadata = json.loads(value or b"null")["metadata"]
        if metadata["msg"] != "delete":
            return None
        name = metadata.get("userKey") or _user_key(key)
        digest = metadata.get("digest")
        return Notice(
            name=name if isinstance(name, str) else None,
            digest=base64.b64decode(digest, validate=True) if digest else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _user_key(key: bytes | None) -> Any:  # noqa: ANN401 (whatever JSON has there)
    return json.loads(key or b"{}").get("userKey")
