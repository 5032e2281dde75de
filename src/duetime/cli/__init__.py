"""The `duetime` command. It starts without Spark: a command imports what it needs when it runs.

```
main       arguments in, exit code out; every error is one sentence
options    options of several commands, and the settings that result
output     tables, bars and times for people
logs       the log of `up`, `run` and `api`, as text or JSON
messages   send, show, cancel, reschedule, pending
manage     dead-letters, queue, schedules
sql        pending messages, queried with SQL
admin      topics, doctor, status
run        up, run, api: the pipeline in a thread, stopped in time by a signal
demo       a temporary Kafka, 1,000 messages, and their lateness
```
"""

from duetime.cli.main import app, main

__all__ = ["app", "main"]
