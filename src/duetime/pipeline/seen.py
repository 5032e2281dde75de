"""The ids that looks have found, held so that each look adds to them and few are copied."""

from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from pyspark.sql import DataFrame

from duetime.stores.places import Place

#: Partitions of what is looked up: ids are few bytes each, and each partition is a task.
ID_PARTITIONS = 8


class Part(NamedTuple):
    """Ids that are held, and of how many records they are about."""

    ids: DataFrame
    records: int


@dataclass(slots=True)
class Seen:
    """What a look has seen: where each partition ended, and the ids up to there, in parts."""

    ends: dict[Place, int] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    @property
    def ids(self) -> DataFrame | None:
        """All of them; None of nothing."""
        if not self.parts:
            return None
        return reduce(DataFrame.unionAll, (each.ids for each in self.parts)).coalesce(ID_PARTITIONS)

    def add(self, ids: DataFrame, records: int) -> None:
        """Hold these as well, as they are now: no job over them reads them again.

        Parts that are no larger become one with them. So there are few, the largest first, and each
        id is copied a few times, and not by each look.
        """
        kept = list(self.parts)
        while kept and kept[-1].records <= records:
            last = kept.pop()
            ids, records = ids.unionAll(last.ids), records + last.records
        held = ids.coalesce(ID_PARTITIONS).localCheckpoint()
        self.parts = [*kept, Part(held, records)]
