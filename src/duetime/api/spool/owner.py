"""Which Kafka the records of a spool are for: noted in its file, so that they go to no other.

Whose it is, of who opens a file that has records in it:

```
another namespace                  not theirs
both cluster ids are known         theirs, if it is one cluster
the noted one alone                theirs at the same bootstrap, until that answers; elsewhere it
                                   has to answer first
not the noted one                  theirs at the same bootstrap: which cluster answers there first
                                   is noted
```
"""

import sqlite3
from dataclasses import dataclass

from duetime.config import Settings

#: One row, or none: of a file that noted nothing, or whose owner was taken out.
SCHEMA = """
CREATE TABLE IF NOT EXISTS owner (
    bootstrap TEXT NOT NULL, namespace TEXT NOT NULL, cluster_id TEXT
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A Kafka, and the namespace there."""

    bootstrap: str
    namespace: str
    #: None until it has answered.
    cluster_id: str | None = None

    def __str__(self) -> str:
        cluster = f"cluster {self.cluster_id}, " if self.cluster_id else ""
        return f"Kafka at {self.bootstrap} ({cluster}namespace {self.namespace})"


def owner_of(settings: Settings, cluster_id: str | None = None) -> Owner:
    """The Kafka of these settings, and which cluster it has said to be."""
    return Owner(bootstrap=settings.bootstrap, namespace=settings.namespace, cluster_id=cluster_id)


def is_one(noted: Owner, asking: Owner) -> bool | None:
    """Whether both are one; None where the cluster has to answer first."""
    if noted.namespace != asking.namespace:
        return False
    if noted.cluster_id and asking.cluster_id:
        return noted.cluster_id == asking.cluster_id
    if noted.bootstrap == asking.bootstrap:
        return True
    return None if noted.cluster_id else False


def read_owner(db: sqlite3.Connection) -> Owner | None:
    """The one that is noted."""
    rows = db.execute("SELECT bootstrap, namespace, cluster_id FROM owner").fetchall()
    return next((Owner(bootstrap=b, namespace=n, cluster_id=c) for b, n, c in rows), None)


def write_owner(db: sqlite3.Connection, owner: Owner) -> None:
    """Note this one, in place of the one that was."""
    row = owner.bootstrap, owner.namespace, owner.cluster_id
    db.execute("DELETE FROM owner")
    db.execute("INSERT INTO owner (bootstrap, namespace, cluster_id) VALUES (?, ?, ?)", row)
