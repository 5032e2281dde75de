"""Delivery: the router, delivery errors by topic metadata, isolation, relays, transactions."""
