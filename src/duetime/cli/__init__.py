"""The `duetime` command. It starts without Spark: what needs it imports it when it runs.

```
entry      arguments in, exit code out: every error is one sentence
options    what many commands take, and the settings made of it
connect    settings whose Kafka answers
messages   send, show, cancel, reschedule
pending    what waits: counts, a histogram, a list
sql        what waits, asked with SQL
dead       dead list, show, redrive
topics     topics, doctor, status
serve      up, run
beside     the HTTP API that `up` has
api        the HTTP API alone
demo       a local Kafka, 1,000 messages, and how punctual they were
service    the pipeline in a thread, stopped in time by a signal
logs       what `up` and `run` say about their work
display    tables, bars and times as people read them
```
"""

from duetime.cli.entry import app, main

__all__ = ["app", "main"]
