"""Schedules of a running pipeline."""

from contextlib import closing

from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S, now_ms
from tests.support.topics import TRACE

from duetime.core import headers as H
from duetime.core.cron import LEAD_MS
from duetime.stores.wheel_reader import WheelReader

MINUTE = 60_000

#: What senders give their schedules.
OWN = [("h", b"\xff"), ("h", None), *TRACE]


def define(live, to, name, *, value=b"\x00v", ago=0, **more):
    """Define a schedule that began `ago` minutes ago, and sends missed runs; return its start."""
    said = {
        "due-topic": to,
        "due-cron": "* * * * *",
        "due-id": name,
        "due-at-ms": now_ms() - ago * MINUTE,
        "due-misfire": "all",
        **{f"due-{key}": text for key, text in more.items()},
    }
    headers = [(key, str(value).encode()) for key, value in said.items()]
    live.send(live.names.native, value, b"\xfek", [*headers, *OWN])
    live.flush()
    return said["due-at-ms"]


def ask(live, name, operation):
    live.send(live.names.control, None, name, [("due-op", operation)])
    live.flush()


def runs_since(start_ms, count):
    first_ms = -(-start_ms // MINUTE) * MINUTE
    return [first_ms + number * MINUTE for number in range(count)]


def every_minute(live, to, name, *, ago, for_ms=0, **more):
    """Define one that began `ago` minutes ago and ends in `for_ms`; return the ids of its runs."""
    until_ms = now_ms() + for_ms
    start_ms = define(live, to, name, ago=ago, until=until_ms, **more)
    count = until_ms // MINUTE - (start_ms - 1) // MINUTE
    return {f"{each:012x}-{name}" for each in runs_since(start_ms, count)}


def of_each_policy(live, to, first_ms, *, ago=0):
    """Define schedules with two runs, a minute apart, to be missed, and one half an hour later.

    Returns their names, the ids of the runs that are made up for, and when the third is due.
    """
    runs_ms = [first_ms, first_ms + MINUTE, first_ms + 30 * MINUTE]
    minutes = ",".join(str(each // MINUTE % 60) for each in runs_ms)
    made_up_for = {"skip": [], "once": runs_ms[1:2], "all": runs_ms[:2]}
    ids = set()
    for policy, come_ms in made_up_for.items():
        name = f"{policy}.{to}"
        define(live, to, name, ago=ago, cron=f"{minutes} * * * *", misfire=policy)
        ids |= {f"{each:012x}-{name}" for each in come_ms}
    return [f"{policy}.{to}" for policy in made_up_for], ids, runs_ms[2]


def wait_for_runs_at(live, names, due_ms):
    """Wait until each of the schedules waits for its run that is due then."""

    def found():
        nexts = [next_of(live, name) for name in names]
        return [each and each.id.due_ms + LEAD_MS for each in nexts]

    eventually(lambda: found() == [due_ms] * len(names), found, PATIENCE_S)


def next_of(live, name):
    with closing(WheelReader(live.settings)) as reader:
        waiting = list(reader.messages(now_ms(), topic=live.names.schedule_commands))
    own = H.DUE_SCHEDULE, name.encode()
    return next((each for each in waiting if own in each.headers), None)
