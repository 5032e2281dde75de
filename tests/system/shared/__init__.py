"""Tests on one pipeline (`live`). It ends with this package: it would take half of a core."""
