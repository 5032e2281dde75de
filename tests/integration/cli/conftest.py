"""Every test of the command ignores this machine's settings."""

from tests.support.command import duetime, nothing_from_outside  # noqa: F401 (fixtures)
