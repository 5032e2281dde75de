"""The worker of docs/queue.md, with the page's configuration."""

from itertools import islice

from tests.support.snippets import changed, of, run

from duetime.queue import Queue
from duetime.queue.message import END_VALUE, start_value


def test_the_documented_worker_acknowledges(jobs, monkeypatch, tmp_path):
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
