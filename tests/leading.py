"""A member of the pipelines' group that leads, and says what a test wants to be told."""

from contextlib import contextmanager

from duetime.clock import SystemClock
from duetime.pipeline.election import Election


@contextmanager
def leading(settings, **told):
    """It leads in this block. It delivers nothing."""
    member = Election(settings, SystemClock())
    member.tell = lambda: told
    member.start()
    try:
        assert member.wait()
        yield
    finally:
        member.close()
