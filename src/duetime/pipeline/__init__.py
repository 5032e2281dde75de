"""The pipeline: Spark queries from Kafka to Kafka, one file or folder each.

    sender -> intake topics -> [intake] -+-> rejected topic   invalid: the reason in a header
                                         +-> destination      due now
                                         +-> lanes topic      due in less than 4 s (the threshold)
                                         +-> a slot of the wheel
    far slot    -> [release job] -> nearer slot -> ... -> 1-second slot
    near slot   -> [release job: deduplicate, drop cancelled, sort by due, pace] -> destination
    lanes topic -> [lanes: wait, route again] -> lanes topic | destination
    schedules   -> schedule commands -> [schedules] -> a run as a message | itself, for the next run
    undelivered -> retry topic       -> [retries]   -> a lane or a slot | dead letters
    may be refused -> isolated topic -> [isolated: with reports] -> destination | retry topic
    other clusters -> outbox topic   -> [outbox]    -> destination there
    x.delayed   -> [delayed.forwarder: one producer, no DataFrame, so that order holds] -> x
    queue markers -> [redelivery: fetch messages that were not acknowledged] -> queue | lane | slot

    transactional delivery, before a destination:  sending topic -> [transactional] -> destination
    another store, in place of a slot:   store inbox -> [saving] -> store -> [release job]
    Aerospike's expirations:             expiry topic -> [notices] -> [release job]

A message's way, in reading order:

    intake/       parse -> validate -> identify -> route: real-time queries, always running
    delivery/     the router, its rows and delivery errors; topic metadata; isolation; the relays,
                  which are the real-time queries of lanes and outboxes
    release/      plans a job of each near slot every second, cascades far slots before their time,
                  and finds overdue messages; the job itself; the index of large slots
    retries       back-off and dead letters, in micro-batches
    schedules     each run of a schedule plans the next one, in micro-batches
    tracker       in-flight messages of queues, in micro-batches with state; `redelivery` sends
                  those again that workers do not acknowledge
    store_queries saves to another store than Kafka, and takes the expirations that it reports
    webhooks      failure callbacks, to hosts and addresses that `ssrf` allows
    recovery/     finishes the uncommitted work of a crash; reads back what is written already;
                  checks that a checkpoint's offsets belong to the topics that are there

The modules that a message goes through, due in an hour:

    query_factory, intake.query                                        a running query
    intake.envelopes, intake.canonical_request                         a valid request with an id
    delivery.router, delivery.rows, delivery.delivery_errors           a row for a slot
    spark.columns, core.timer_wheel                                    its level and its slot
    leadership.lease, spark.kafka_io                                   the row is sent
    release.scheduler, release.cascades, stores.wheel_store            a claim of the slot
    release.job, then the router again                                 a row for the destination

What runs them:

    service          a process: starts Spark, warms up, leads or stands by, stops
    leadership/      chooses the leader; the lease that every row checks, the watchdog of its JVM
    leader           starts and stops everything that delivers while this process leads
    query_factory    builds each query, after recovery; `query_supervisor` restarts it
    monitoring/      metrics, probes and warm-up
    faults           crash points for tests
"""

#: Names of the queries, of their producers and of the directories of their checkpoints. A query
#: that sends to another cluster has the cluster's name after OUTBOX or ISOLATED_AT.
INTAKE, INTAKE_TX, LANES, OUTBOX = "intake", "intake-tx", "lanes", "outbox-"
ISOLATED_AT = "isolated-"
RETRIES, ISOLATED, SCHEDULES, REDELIVERY = "retries", "isolated", "schedules", "redelivery"
SAVING, NOTICES = "saving", "notices"

#: The name of the producer of what recovery sends, of each query.
RECOVER = "recover"
