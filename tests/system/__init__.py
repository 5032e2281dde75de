"""Tests on one pipeline (`live`). It ends with this package: what comes after may stop Spark."""
