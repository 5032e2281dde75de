"""What Kafkas that tests make for the courier have in common."""


class MadeKafka:
    """A producer, and what makes one: the courier is given itself."""

    def __init__(self):
        self.arrived = set()

    def __call__(self, *_, **__):
        return self

    def poll(self):
        """Nothing comes in by itself."""

    def flush(self, _):
        return 0

    def install(self, monkeypatch, *, name_of=str, acknowledge_s, ask_again_s):
        """In place of Kafka; what has arrived is read back by the names that it is kept by."""
        courier = "duetime.api.courier"
        monkeypatch.setattr("duetime.api.carrier.Producer", self)
        monkeypatch.setattr(
            f"{courier}.arrived",
            lambda _, taken: {each for each in taken if name_of(each) in self.arrived},
        )
        monkeypatch.setattr(f"{courier}.ACKNOWLEDGE_S", acknowledge_s)
        monkeypatch.setattr(f"{courier}.ASK_AGAIN_S", ask_again_s)
