"""A pipeline's member of the election that leads, and says what a test wants to be told."""

from contextlib import contextmanager

from duetime.core.clock import SystemClock
from duetime.pipeline.leadership.election import Election


@contextmanager
def leading(settings, **told):
    """It leads in this block. It delivers nothing."""
    member = Election(settings, SystemClock())
    member.status = lambda: told
    member.start()
    try:
        assert member.wait()
        yield
    finally:
        member.close()
