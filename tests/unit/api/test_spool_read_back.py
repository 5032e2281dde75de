"""What is under way while the spool reads back what has arrived. A Kafka whose reports are ours."""

import asyncio

import pytest
from tests.support.made_kafka import until
from tests.support.spooling import dispatching, record

from duetime.core.clock import SystemClock
from duetime.core.errors import KafkaError
from duetime.core.metrics import API_SPOOLED


@pytest.fixture
def kafka(reported):
    return reported


def test_what_is_spooled_meanwhile_and_arrives_is_not_sent_again(kafka, tmp_path, caplog):
    failing, arriving, late = (record(each) for each in range(3))

    async def run():
        clock = SystemClock()
        async with dispatching(tmp_path, clock) as dispatcher:
            sent = await asyncio.gather(dispatcher.send([failing]), dispatcher.send([arriving]))
            assert sent == [False, False]
            kafka.report(failing, KafkaError("the local queue is gone"))
            await until(lambda: "the spool cannot be drained" in caplog.text)
            # Handed over before the others were spooled, and spooled after them.
            under_way = dispatcher._producer.hand_over([late])
            await dispatcher._put_shielded(None, [late], clock.now_ms(), under_way)
            kafka.report(arriving)
            await until(lambda: len(dispatcher._arriving) < 2)
            # It is still waited for, before anything is read back and sent again.
            assert under_way.arrived in dispatcher._arriving
            assert "m2" not in kafka.handed[3:]
            kafka.report(late)
            await until(lambda: kafka.handed.count("m0") == 2)
            kafka.report(failing)
            await until(lambda: not dispatcher._spooling)

    asyncio.run(run())
    assert kafka.handed == ["m0", "m1", "m2", "m0"]


def test_metric_is_0_once_the_spool_is_empty(kafka, tmp_path):
    """Also where a put was counted twice: it was in the file, and ended, after the read-back."""
    message = record(0)

    async def run():
        async with dispatching(tmp_path) as dispatcher:
            assert await dispatcher.send([message]) is False
            API_SPOOLED.inc()
            kafka.report(message)
            await until(lambda: not dispatcher._spooling)

    asyncio.run(run())
    assert API_SPOOLED._value.get() == 0
