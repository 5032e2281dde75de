"""Index files of delayed topics, and damage to them."""

from duetime.delayed.segments import SegmentFiles


def files_in(directory, group="shop"):
    return SegmentFiles(location=directory, group=group, topic="orders", topic_id="id", partition=0)


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)
