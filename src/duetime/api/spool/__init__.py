"""The spool: what is accepted while Kafka does not answer, until Kafka has it.

```
claim     whether what is in the file may go to this Kafka
  owner   which Kafka that is: noted in the file
thread    the one thread that has the file
  file    SQLite, in order of arrival
    rows  records as its rows
readback  after a crash: what of it has arrived
shown     a message in it, as one that waits
```
"""
