"""The HTTP API: FastAPI over the same functions as the command line.

```
request -> guard      who asks (tokens), limits of size and time, for every request
        -> services   what requests need: settings, clock, reader, dispatcher
        -> messages   schedule, list, show, cancel, reschedule, deliver now
           dead       dead letters: list, show, redrive
           rejected   records that were refused: list, show
           state      pending, status, events, health, metrics
           watch      what the events say, asked for once for all who listen
           dashboard  the page for people, of the same requests
           keys       what senders called their messages: the same answer twice
        -> dispatcher      records to Kafka, and when they have arrived
           submission      what is taken of one request
           async_producer  Kafka's client, and another one when it fails for good
           producer_batch  what has become of records that were handed to it together
           spool           what is accepted while Kafka does not answer, and for which Kafka
errors  -> problems   RFC 9457, with the reasons of duetime.errors
serve, address        the server: host, port, TLS
```
"""
