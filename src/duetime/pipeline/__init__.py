"""The queries, all of them DataFrames from Kafka to Kafka.

sender -> intake topics -> [intake] -+-> rejected topic     invalid: the reason in a header
                                     +-> destination        due already
                                     +-> lanes topic        due in less than the horizon (4 s)
                                     +-> a slot of the wheel
far slot    -> [turn] -> nearer slot -> ... -> 1-second slot
near slot   -> [turn: dedupe, drop cancelled, sort by due, pace] -> destination
lanes topic -> [lanes: wait, look again] -> lanes topic | destination

intake, lanes   real-time queries, always running
release         plans a turn of one near slot every second, a little ahead
cascade         plans a turn of a far slot before its time begins
rescue          plans a turn of whatever is past due and was not released
runner          starts all of these, warms them up, watches them, stops them
"""
