"""How the log of a topic in which messages wait is cut into segments.

Kafka frees whole segments only, and never the active one. Many small segments give the disk back
soon, but each costs the broker a file descriptor and two memory maps, of which a machine has 65,530
by default. So the size and the age of a segment follow from how long a partition is filled. With
the default wheel:

    level   a partition is filled for   a segment is closed after   or at
    0       88 s                        10 min                      16 MiB
    1       69 min                      10 min                      96 MiB
    2       74 h                        9 h                         512 MiB
    3       197 days                    25 days                     512 MiB
    4       34 years                    4 years                     512 MiB

A slot that is emptied keeps its active segment until its partition is filled by the next turn of
the ring: an eighth of what it held, and 512 MiB at most. `tests/test_segments.py` counts the
segments of a broker.
"""

#: A partition that is filled for less time than this has segments of the least size, in ms.
LEAST_MS = 600_000

#: The size of a segment for each LEAST_MS that its partition is filled, in bytes.
LEAST_BYTES = 16 * 1024 * 1024

#: The largest segment, in bytes: a billion messages of 350 bytes have 652 of them.
MOST_BYTES = 512 * 1024 * 1024

#: How many segments a partition has that is filled slowly. Of each level 65 partitions are filled
#: at a time, and three levels have long ones: 8 make 1,500 segments in all, and 16 make 2,300.
SEGMENTS = 8

#: Bytes of a segment for each byte of an index of it. The time index has 12 bytes for every 4,096
#: (`index.interval.bytes`), a ratio of 341. A full index closes the segment before its time.
BYTES_PER_INDEX_BYTE = 256


def segment_settings(filled_ms: int, largest_bytes: int) -> dict[str, str]:
    """Return the settings of a topic whose partitions are filled for `filled_ms` at a time.

    `largest_bytes` is the topic's max.message.bytes: Kafka refuses a batch larger than a segment.
    """
    size = max(1, filled_ms // LEAST_MS) * LEAST_BYTES
    size = max(min(size, MOST_BYTES), largest_bytes)
    return {
        "segment.bytes": str(size),
        "segment.ms": str(max(LEAST_MS, filled_ms // SEGMENTS)),
        "segment.index.bytes": str(size // BYTES_PER_INDEX_BYTE),
    }
