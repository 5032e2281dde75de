import sys

from rich.console import Console

from duetime.cli.demo import by_lateness
from duetime.cli.messages import by_distance
from duetime.cli.terminal import facts, histogram, printable, program, size, when
from duetime.core.timer_wheel import Slot
from duetime.stores import PendingSlot, overlapping

NOW_MS = 1_800_000_000_000


def slot(from_s, to_s, count):
    return PendingSlot(
        slot=Slot(0, 0),
        start_ms=NOW_MS + from_s * 1_000,
        end_ms=NOW_MS + to_s * 1_000,
        count=count,
    )


def bars(*counts):
    with (out := Console(width=80)).capture() as capture:
        out.print(histogram([("row", count) for count in counts]))
    return ["".join(line.split()[2:]) for line in capture.get().splitlines()]


def test_a_bar_is_as_long_as_its_share():
    assert bars(16, 8, 1) == ["█" * 40, "█" * 20, "██▌"]


def test_a_bar_of_zero_is_empty_and_a_small_one_visible():
    assert bars(0) == [""]
    assert bars(0, 1, 1_000_000) == ["", "▏", "█" * 40]


def test_control_characters_are_escaped():
    assert printable(b"\x1b[31mred\x07") == "\\x1b[31mred\\x07"
    assert printable("\u202egnirts".encode()) == "\\u202egnirts"
    assert printable(b"\xff\xfe") == "\\xff\\xfe"
    assert printable(b"a\nb") == "a\\nb"
    assert printable(b"a\nb", lines=True) == "a\nb"
    assert printable("größe ✓".encode()) == "größe ✓"
    assert printable(None) == "(null)"


def test_sizes_are_in_units_of_people():
    assert [size(each) for each in (0, 999, 1_000, 2_500_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.5 MB",
    ]


def test_a_time_says_how_far_away_it_is():
    assert when(NOW_MS + 90_000, NOW_MS) == "2027-01-15T08:01:30.000Z (in 1m 30s)"
    assert when(NOW_MS - 1_500, NOW_MS).endswith("(1s ago)")


def test_a_fact_of_several_lines_stays_in_its_column():
    assert facts([("key", "k"), ("value", "one\ntwo")]) == "key    k\nvalue  one\n       two"


def test_slots_are_counted_by_distance():
    slots = [slot(-9, -1, 1), slot(2, 3, 2), slot(50, 51, 3), slot(86_500, 90_000, 4)]

    assert [row for row in by_distance(slots, NOW_MS) if row[1]] == [
        ("overdue", 1),
        ("under 10s", 2),
        ("under 1m", 3),
        ("under 1w", 4),
    ]


def test_rows_begin_and_end_with_something():
    rows = by_distance([slot(50, 51, 3), slot(86_500, 90_000, 4)], NOW_MS)

    assert rows[0] == ("under 1m", 3)
    assert rows[-1] == ("under 1w", 4)
    assert by_distance([], NOW_MS) == []


def test_a_slot_that_has_begun_counts_by_its_remainder():
    (row,) = by_distance([slot(-1_000_000, 15, 1)], NOW_MS)
    assert row == ("under 10s", 1)


def test_the_histogram_counts_all_slots():
    slots = [slot(2**each, 2**each + 1, 1) for each in range(35)]
    assert sum(count for _, count in by_distance(slots, NOW_MS)) == 35


def test_a_range_takes_every_slot_that_overlaps_it():
    slots = [slot(0, 10, 1), slot(10, 20, 1), slot(20, 30, 1), slot(30, 40, 0)]
    start_ms, end_ms = NOW_MS + 10_000, NOW_MS + 21_000

    assert overlapping(slots, start_ms, end_ms) == slots[1:3]
    assert overlapping(slots, None, None) == slots[:3]


def test_lateness_is_counted_in_rows_up_to_the_latest():
    rows = dict(by_lateness([0, 0, 1, 3, 17]))

    assert rows == {"0 ms": 2, "1 ms": 1, "2 to 4 ms": 1, "5 to 9 ms": 0, "10 to 19 ms": 1}


def test_early_messages_have_a_row():
    assert by_lateness([-1, 5_000])[0] == ("early", 1)
    assert by_lateness([-1, 5_000])[-1] == ("1000 ms and more", 1)


def test_a_command_is_shown_as_this_program_was_called(monkeypatch, tmp_path):
    script = tmp_path / ".venv" / "bin" / "duetime"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "up"])
    monkeypatch.setenv("PATH", "/bin")
    assert program() == ".venv/bin/duetime"
    monkeypatch.chdir("/")
    assert program() == str(script)[1:]
    monkeypatch.setenv("PATH", str(script.parent))
    assert program() == "duetime"


def test_a_module_is_shown_with_the_python_that_ran_it(monkeypatch, tmp_path):
    python = tmp_path / "a b" / "python"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "duetime" / "__main__.py"), "up"])
    assert program() == "'a b/python' -m duetime"
