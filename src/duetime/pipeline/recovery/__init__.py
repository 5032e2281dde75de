"""Recovery: finish what a crash interrupted, each message once.

`checkpoint` makes a query's checkpoint one that Spark can go on from. `deduplicator` drops records
whose message has moved on since, and has the worked example; it learns that from `read_back`, which
scans the topics. What a real-time query had in flight is finished before the query starts, by a
handler in the query's module: `intake.query`, `delivery.relays`.
"""
