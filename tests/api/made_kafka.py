"""What Kafkas that tests make for the dispatcher have in common."""

from duetime.errors import KafkaError


class MadeKafka:
    """A producer, and what makes one: the dispatcher is given itself."""

    def __init__(self):
        self.arrived = set()
        #: Which cluster it says to be; None is that it does not answer.
        self.cluster = "made"

    def __call__(self, *_, **__):
        return self

    def offer(self, record, report):
        """There is always room."""
        self.send(record, report)
        return True

    def poll(self):
        """Nothing comes in by itself."""

    def flush(self, _):
        return 0

    async def id(self):
        """As a cluster."""
        if self.cluster is None:
            raise KafkaError("it does not answer")
        return self.cluster

    def install(self, monkeypatch, *, name_of=str, acknowledge_s, ask_again_s):
        """In place of Kafka; what has arrived is read back by the names that it is kept by."""
        dispatcher = "duetime.api.dispatcher"
        monkeypatch.setattr("duetime.api.async_producer.Producer", self)
        monkeypatch.setattr("duetime.api.spool.claim.Cluster", lambda _: self)
        monkeypatch.setattr(
            f"{dispatcher}.arrived",
            lambda _, taken: {each for each in taken if name_of(each) in self.arrived},
        )
        monkeypatch.setattr(f"{dispatcher}.ACKNOWLEDGE_S", acknowledge_s)
        monkeypatch.setattr(f"{dispatcher}.ASK_AGAIN_S", ask_again_s)
