"""Who may do what: named tokens, each for some topics and at some rate.

The name is what logs may say; the token itself is compared in constant time, and kept as a hash.
"""

import hmac
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from duetime.api.problems import TooMany, TopicNotAllowed, Unauthorised
from duetime.tables import ApiToken, fits

#: Where the guard notes in the ASGI scope of a request who asks.
CALLER = "duetime.caller"

#: How long a token may save up what it did not send, in seconds.
BURST_S = 1.0


@dataclass(kw_only=True)
class Rate:
    """So many a second, and a second's worth at once. Thread-safe."""

    per_second: float
    _left: float = field(init=False)
    _at_s: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._left = self._most

    @property
    def _most(self) -> float:
        # Whoever may send one in ten seconds must be able to send that one.
        return max(1.0, self.per_second * BURST_S)

    def take(self, count: int, now_s: float) -> None:
        """Use up so many. Raises TooMany, and uses up none then.

        More than can ever be saved up may go when all is saved up: it is paid off afterwards.
        """
        with self._lock:
            left = min(self._most, self._left + (now_s - self._at_s) * self.per_second)
            needed = min(float(count), self._most)
            if left < needed:
                wait_s = math.ceil((needed - left) / self.per_second)
                raise TooMany(f"the token may send {self.per_second:g} messages a second", wait_s)
            self._left, self._at_s = left - count, now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and what for."""

    name: str
    topics: tuple[str, ...] = ("*",)
    #: Patterns of the other clusters on which these topics are meant, too.
    clusters: tuple[str, ...] = ("*",)
    rate: Rate | None = None

    @property
    def sees_all(self) -> bool:
        """Whether every topic of every cluster is allowed."""
        return "*" in self.topics and "*" in self.clusters

    def allows(self, topic: str, cluster: str | None) -> bool:
        """Whether this topic is; without a cluster it is one of this cluster."""
        return fits(topic, self.topics) and (cluster is None or fits(cluster, self.clusters))

    def check(self, topic: str, cluster: str | None) -> None:
        """Raise TopicNotAllowed unless the topic is allowed."""
        if not self.allows(topic, cluster):
            there = "" if cluster is None else f" on cluster {cluster!r}"
            raise TopicNotAllowed(f"the token {self.name} is not for topic {topic!r}{there}")

    def spend(self, messages: int, now_s: float | None = None) -> None:
        """Count messages that it sends. Raises TooMany."""
        if self.rate:
            self.rate.take(messages, time.monotonic() if now_s is None else now_s)


#: Who asks where there are no tokens: somebody on this machine.
ANYBODY = Caller(name="anybody")


def token_of(authorization: bytes) -> str | None:
    """The token that this header has."""
    scheme, _, token = authorization.decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def reader_of_tokens(tokens: Mapping[str, ApiToken]) -> Callable[[str | None], Caller]:
    """What finds out who has a token. It raises Unauthorised."""
    callers = [_known(name, each) for name, each in tokens.items()]

    def who(token: str | None) -> Caller:
        if not callers:
            return ANYBODY
        given, found = _hash(token or ""), None
        for known, caller in callers:
            # All of them, always: how long it takes says nothing about which was right.
            if hmac.compare_digest(known, given):
                found = caller
        if found is None:
            raise Unauthorised("no such token: send it as `Authorization: Bearer TOKEN`")
        return found

    return who


def _known(name: str, token: ApiToken) -> tuple[bytes, Caller]:
    rate = Rate(per_second=token.rate) if token.rate else None
    hashed = _hash(token.token.get_secret_value())
    if token.topics is None and not token.clusters:
        return hashed, Caller(name=name, rate=rate)
    topics = ("*",) if token.topics is None else token.topics
    return hashed, Caller(name=name, topics=topics, clusters=token.clusters, rate=rate)


def _hash(token: str) -> bytes:
    return sha256(token.encode(errors="surrogatepass")).digest()
