"""What is noted of a queue's partitions adds up."""

from duetime.kmq.notes import Note


def test_the_notes_of_partitions_add_up_to_their_queues():
    notes = [Note(open=1, oldest_ms=200, out=3), Note(out=4), Note(open=2, oldest_ms=100)]
    assert sum(notes, Note()) == Note(open=3, oldest_ms=100, out=7)


def test_a_note_is_read_as_it_was_written_and_none_as_nothing():
    note = Note(open=1, oldest_ms=200, out=3)
    assert Note.of(note.text()) == note
    assert Note.of(None) == Note()
