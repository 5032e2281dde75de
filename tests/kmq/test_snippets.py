"""The worker of docs/queue.md, on a queue that is configured as the page says."""

from itertools import islice

import pytest
from tests.snippets import changed, of, run

from duetime.kmq import Queue
from duetime.kmq.markers import END_VALUE, start_value


@pytest.mark.system
def test_the_worker_works_and_acknowledges(jobs, monkeypatch, tmp_path):
    (worker,), (configured, *_) = of("python", page="queue.md"), of("toml", page="queue.md")
    toml = changed(configured, {"jobs": jobs.topic})
    (tmp_path / "duetime.toml").write_text(toml, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DUETIME_BOOTSTRAP", jobs.settings.bootstrap)
    without_end, worked = Queue.__iter__, []

    def one(queue):
        with queue:
            yield from islice(without_end(queue), 1)

    monkeypatch.setattr(Queue, "__iter__", one)
    jobs.send("a")
    run(worker, {'"jobs"': f'"{jobs.topic}"'}, work=worked.append)

    assert worked == [b"a"]
    assert [value for _, _, value, _ in jobs.markers(2)] == [start_value(30_000), END_VALUE]
