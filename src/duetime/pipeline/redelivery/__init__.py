"""Redelivery of unacknowledged queue messages: the tracker of markers, and what follows from it."""
