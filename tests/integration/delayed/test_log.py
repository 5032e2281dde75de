"""Ranges of a real log."""

from tests.support.delayed_topics import offsets

from duetime.kafka.range_reader import LogReader


def test_ranges_of_several_partitions_are_read_together(two_partitions):
    topic = two_partitions
    for number in range(4_000):
        topic.send(None, str(number), partition=number % 2)
    topic.flush()
    first, second = ((topic.name, partition) for partition in (0, 1))
    with LogReader(topic.properties()) as reader:
        assert reader.all_bounds([first, second]) == {first: (0, 2_000), second: (0, 2_000)}
        for stretches in (
            {first: (0, 5), second: (0, 2_000)},
            {first: (5, 2_000), second: (7, 8)},
            {first: (2_000, 2_000), second: (0, 1)},
        ):
            assert offsets(reader, stretches) == {
                place: list(range(*stretch)) for place, stretch in stretches.items()
            }
