"""Admin requests that go to a broker which has just died."""

from concurrent.futures import Future

import pytest
from confluent_kafka import KafkaError, KafkaException

from duetime.kafka.descriptions import admin_answers

DEAD, ALIVE = 1, 2


class Client:
    """A client that sends to the controller of its last metadata, which name them in turn."""

    def __init__(self, *named):
        self.controller, self._named = DEAD, list(named)

    def list_topics(self, _topic, timeout):
        assert timeout > 0
        self.controller = self._named.pop(0) if self._named else self.controller
        return self

    @property
    def controller_id(self):
        return self.controller


def asked(client, error=KafkaError._TIMED_OUT):
    """Return a request, which only a live broker answers, and its timeouts so far."""
    timeouts_s = []

    def ask(timeout_s):
        timeouts_s.append(timeout_s)
        answer = Future()
        if client.controller == ALIVE:
            answer.set_result("described")
        else:
            answer.set_exception(KafkaException(KafkaError(error)))
        return {"orders": answer}

    return ask, timeouts_s


@pytest.mark.parametrize("named", [[ALIVE], [DEAD, DEAD, ALIVE], [DEAD, ALIVE, DEAD, ALIVE]])
def test_the_request_is_repeated_once_another_controller_is_named(named):
    client = Client(*named)
    ask, timeouts_s = asked(client)
    assert admin_answers(client, ask, 60)["orders"].result() == "described"
    assert len(timeouts_s) <= 3


@pytest.mark.parametrize(
    ("timeout_s", "tries_s"), [(0.2, [0.2]), (0.6, [0.5, 0.6]), (60, [0.5, 1, 60])]
)
def test_the_last_try_has_the_time_that_is_left(timeout_s, tries_s):
    client = Client()
    ask, timeouts_s = asked(client)
    answer = admin_answers(client, ask, timeout_s)["orders"]
    assert answer.exception().args[0].code() == KafkaError._TIMED_OUT
    assert timeouts_s[:-1] == tries_s[:-1]
    # Asking for another controller takes time, too.
    assert tries_s[-1] / 2 < timeouts_s[-1] <= tries_s[-1]


def test_a_refusal_is_an_answer():
    ask, timeouts_s = asked(Client(ALIVE), KafkaError.TOPIC_AUTHORIZATION_FAILED)
    answer = admin_answers(Client(ALIVE), ask, 60)["orders"]
    assert answer.exception().args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert len(timeouts_s) == 1
