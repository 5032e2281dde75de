"""Tests on whole pipelines, which they start."""
