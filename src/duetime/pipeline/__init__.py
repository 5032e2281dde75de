"""The queries, all of them DataFrames from Kafka to Kafka.

sender -> intake topics -> [intake] -+-> rejected topic     invalid: the reason in a header
                                     +-> destination        due already
                                     +-> lanes topic        due in less than the horizon (4 s)
                                     +-> a slot of the wheel
far slot    -> [turn] -> nearer slot -> ... -> 1-second slot
near slot   -> [turn: dedupe, drop cancelled, sort by due, pace] -> destination
lanes topic -> [lanes: wait, look again] -> lanes topic | destination
x.delayed   -> [duetime.delayed.visible: no DataFrame, but one producer, so that order holds] -> x
what comes again    -> recurring    -> [recurring] -> a run on its way | itself, for the next one
what cannot be sent -> failed topic -> [failures] -> a lane or a slot, for a retry | dead letters
retries, and what may be refused -> isolated topic -> [isolated: one by one] -> destination | failed
a queue's markers -> [redelivery: what is open too long, fetched] -> the queue | a lane or a slot

with transactional delivery, to a destination: sending topic -> [transactional] -> destination
with another store, instead of a slot:   store topic -> [saving] -> store -> [turn] -> destination
with Aerospike's notifications           notices topic -> [notices] --------> [turn] -> destination

intake, lanes   real-time queries, always running; recover finishes first what they had in flight
recurring       a micro-batch query: each run of a series schedules the next one
failures        a micro-batch query: retries with back-off, and dead letters
isolated        a micro-batch query: sends record by record, and knows what became of each
saving          a micro-batch query: what is to wait in another store than Kafka is saved there
notices         a micro-batch query: what Aerospike says is due is taken up
transactional   delivers in Kafka's transactions, where that is switched on
claims          reads what is to be taken up, from whatever store
redelivery      a micro-batch query with state: what a queue's workers do not acknowledge
waking          wakes redelivery when its next message is overdue: until then it sleeps
release         plans a turn of one near slot every second, a little ahead
cascades        plans a turn of a far slot before its time begins, the most urgent one first
rescue          plans a turn of whatever is past due and was not released
planned         keeps the plan of a turn, and puts another read under it
written         reads back what is written, so that nothing is written twice
progress        how far a message has come: which of its records is the latest
obstacles       why a row cannot be sent, by what it knows of the topic that it is for
destinations    keeps what rows know of topics up to date
details         asks for the settings of topics, and which partitions take nothing now
isolation       finds the destinations that failed a sink, and isolates them
log_ends        asks leaders where their logs end, which readers may not be shown yet
checkpoint      sees that a query's offsets belong to the topics that are there
first_start     where intake begins that has no checkpoint yet
indexing        indexes large slots, so that one message is found without reading all
begin           begins each query, and finishes first what it had in flight
leader          starts and stops all that delivers, for as long as this process leads
health, probe   tell Prometheus what waits, what came, and how late probes are
runner          a process: starts Spark, warms up, leads or stands by, stops
"""
