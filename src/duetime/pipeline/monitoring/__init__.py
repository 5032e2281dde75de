"""Observation of the leader: metrics and warnings, probes, and the warm-up before them."""
