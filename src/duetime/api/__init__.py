"""The HTTP API: FastAPI over the functions of `client` and `stores`; it imports no Spark.

```
request -> security     time limit, origin, token and body of every request
        -> routes       messages, schedules, dead letters, health; with `requests` and
                        `dependencies`; answers are the models of `client.http_models`
           events       the live part of the dashboard, polled once for all listeners
        -> core.records, client.producer: a request as a record of the intake topic
        -> idempotency  a request that is repeated in flight gets the answer of the first
        -> dispatcher   records to Kafka, directly or through the spool
           producer     Kafka's client in the event loop, replaced when it fails for good
           spool        what is accepted while Kafka does not answer
errors                  problem details (RFC 9457), and their documentation
server                  the ASGI app; host, port, TLS, connections
dashboard/              the page: static files, which use the API as any client does
```
"""
