"""What a standby repeats until it is warm: it sends to the warm-up topic, and to nothing else."""

from threading import Event

from duetime.kafka.offsets import Offsets
from duetime.pipeline.monitoring.synthetic_messages import ARRIVALS, DRILL_MESSAGES, WarmUp


def test_drilled_recovery_sends_only_to_the_warm_up_topic(live):
    names, pipeline = live.names, live.pipeline
    arrivals = (names.warmup, ARRIVALS)
    others = [(topic, 0) for topic in (names.rejected, names.retry, names.dead_letter, names.lanes)]
    offsets = Offsets(live.settings)
    before = offsets.ends([arrivals, *others])
    pipeline._drill_recovery(WarmUp(live.settings, pipeline._clock, Event()))
    after = offsets.ends([arrivals, *others])
    offsets.close()
    # Those of intake. The others count as delivered, because they lie in their destination.
    assert after[arrivals] == before[arrivals] + DRILL_MESSAGES
    assert all(after[each] == before[each] for each in others)
