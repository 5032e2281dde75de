"""How many segments a broker has, by arithmetic.

Every partition of the wheel is taken to be on one broker, with replication 1: a broker of several
has fewer. A segment costs two memory maps, and Linux allows a process 65,530 of them by default;
2,000 segments leave room for whatever else the broker has.
"""

import pytest

from duetime.core.messages import LATEST_MS
from duetime.core.settings import Settings
from duetime.core.topics import required_topics, segment_settings

MOST_SEGMENTS = 2_000

#: What a message weighs while it waits, with duetime's headers, in bytes.
MESSAGE_BYTES = 350

DAY_MS = 86_400_000

SETTINGS = Settings()
WHEEL = SETTINGS.wheel
LEVELS = range(WHEEL.levels)


def own_settings(level, settings=SETTINGS):
    name = f"{settings.namespace}.wheel.{level}"
    (topic,) = (each for each in required_topics(settings) if each.name == name)
    return {name: int(value) for name, value in topic.settings.items() if "segment" in name}


def reached_level(ahead_ms):
    return next(each for each in LEVELS if ahead_ms < WHEEL.filled_ms(each))


def segments_of(level, filled_ms, waiting):
    """The most segments of a partition that was filled for a while, and evenly, with messages."""
    own = own_settings(level)
    return 1 + waiting * MESSAGE_BYTES // own["segment.bytes"] + filled_ms // own["segment.ms"]


def segments_on_broker(pending, filled_evenly):
    """The segments of all partitions: `pending` gives the messages that are due in a stretch.

    On the levels `filled_evenly` a partition gets messages all the time that it is open. On others
    it gets them at once, when a slot of the level above is cascaded.
    """
    total = 0
    for level in LEVELS:
        width_ms, nearest = WHEEL.width_ms(level), WHEEL.filled_ms(level - 1) if level else 0
        for ahead in range(WHEEL.ring):
            from_ms, to_ms = max(ahead * width_ms, nearest), (ahead + 1) * width_ms
            is_open = ahead < WHEEL.reach(level)
            filled_ms = WHEEL.filled_ms(level) - from_ms if level in filled_evenly else 0
            waiting = pending(from_ms, to_ms) if is_open and to_ms > from_ms else 0
            # What is emptied has its active segment still.
            total += segments_of(level, filled_ms, waiting) if is_open else 1
    return total


def spread(messages, first_ms, last_ms):
    """So many messages that are pending, due evenly between two instants from now on."""

    def pending(from_ms, to_ms):
        shared_ms = max(0, min(to_ms, last_ms) - max(from_ms, first_ms))
        return messages * shared_ms // (last_ms - first_ms)

    return pending


def test_one_message_a_second_for_half_a_year_makes_few_segments():
    """Delays of 3 to 190 days, evenly: 8.3 million wait, nearly all of them on level 3."""
    mean_s = (3 + 190) / 2 * DAY_MS / 1_000

    pending = spread(int(mean_s), 0, 190 * DAY_MS)

    assert reached_level(3.3 * DAY_MS) == reached_level(190 * DAY_MS) == 3
    assert segments_on_broker(pending, {3}) <= MOST_SEGMENTS


def test_messages_on_all_levels_at_once_make_few_segments():
    """The same, where every partition gets a message before each of its segments is too old."""
    assert segments_on_broker(spread(1, 0, 1), set(LEVELS)) <= MOST_SEGMENTS


@pytest.mark.parametrize(
    ("first_ms", "last_ms", "level"),
    [(3.3 * DAY_MS, 190 * DAY_MS, 3), (2 * 3_600_000, 3 * DAY_MS, 2)],
    ids=["half-a-year", "three-days"],
)
def test_a_billion_that_wait_make_few_segments(first_ms, last_ms, level):
    """Due evenly from the first to the last day, and sent all the time that their slots are open.

    350 GB. Sooner than that a billion cannot be due: 68 minutes of the fastest pipeline that was
    measured are a quarter of it.
    """
    pending = spread(1_000_000_000, int(first_ms), int(last_ms))

    assert reached_level(last_ms) == level
    assert segments_on_broker(pending, {level}) <= MOST_SEGMENTS


@pytest.mark.parametrize("level", LEVELS)
def test_the_indexes_of_a_segment_suffice_until_it_is_full(level):
    own = own_settings(level)
    entries = own["segment.bytes"] // 4_096

    assert entries * 8 < own["segment.index.bytes"]
    assert entries * 12 < own["segment.index.bytes"]


@pytest.mark.parametrize("level", LEVELS)
def test_emptied_slot_keeps_little_of_its_records(level):
    own, filled_ms = own_settings(level), WHEEL.filled_ms(level)

    assert own["segment.bytes"] <= 512 * 1024**2
    assert own["segment.ms"] <= max(600_000, filled_ms // 8)


def test_a_message_of_any_size_fits_into_a_segment():
    """Kafka refuses a batch that is larger than a segment, whatever the largest message is."""
    largest = Settings(max_message_bytes=64 * 1024**2)

    for topic in required_topics(largest):
        size = int(topic.settings.get("segment.bytes", 1024**3))
        assert size >= int(topic.settings.get("max.message.bytes", 0))


def test_a_wheel_of_any_shape_has_settings_that_kafka_takes():
    found = segment_settings(LATEST_MS * 128, 1_000_000)

    assert int(found["segment.bytes"]) < 2**31
    assert int(found["segment.index.bytes"]) < 2**31
    assert int(found["segment.ms"]) < 2**63
