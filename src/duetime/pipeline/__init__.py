"""The queries, all of them DataFrames from Kafka to Kafka.

sender -> intake topics -> [intake] -+-> rejected topic     invalid: the reason in a header
                                     +-> destination        due already
                                     +-> lanes topic        due in less than the horizon (4 s)
                                     +-> a slot of the wheel
far slot    -> [turn] -> nearer slot -> ... -> 1-second slot
near slot   -> [turn: dedupe, drop cancelled, sort by due, pace] -> destination
lanes topic -> [lanes: wait, look again] -> lanes topic | destination
what cannot be sent -> failed topic -> [failures] -> a lane or a slot, for a retry | dead letters

intake, lanes   real-time queries, always running; recover finishes first what they had in flight
failures        a micro-batch query: retries with back-off, and dead letters
release         plans a turn of one near slot every second, a little ahead
cascade         plans a turn of a far slot before its time begins
rescue          plans a turn of whatever is past due and was not released
written         reads back what is written, so that nothing is written twice
destinations    what the rows know of the topics that they are for
runner          starts all of these, warms them up, watches them, stops them
"""
