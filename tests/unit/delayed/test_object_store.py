"""Index files in an object store: an S3 server on loopback."""

import subprocess
import sys
import time

import numpy as np
import pytest
from pyarrow import fs
from tests.support.clocks import eventually
from tests.support.delayed_topics import PATIENCE_S, read, values

from duetime.delayed.index import Cursor, DeliverAfterIndex, SegmentLimits
from duetime.delayed.segments import ENTRY, SegmentFiles
from duetime.local.process import free_port

BUCKET = "duetime"

#: Longer than handing a file over takes, and shorter than a failure of the store, in seconds.
PROMPT_S = 3.0


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")


def url(port, **more):
    options = {"endpoint_override": f"127.0.0.1:{port}", "scheme": "http", "region": "us-east-1"}
    query = "&".join(f"{name}={value}" for name, value in (options | more).items())
    return f"s3://{BUCKET}/index?{query}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return the port of the S3 server."""
    port, said = free_port(), tmp_path_factory.mktemp("s3") / "server.log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with said.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    eventually(lambda: "Running on" in said.read_text(), "the store did not start")
    yield port
    process.terminate()
    process.wait(PATIENCE_S)


@pytest.fixture
def store(server):
    """Return the store, and the location of index files in it."""
    location = url(server, allow_bucket_creation="true", allow_bucket_deletion="true")
    system, _ = fs.FileSystem.from_uri(location)
    system.create_dir(BUCKET)
    yield system, location
    system.delete_dir(BUCKET)


def files(location):
    return SegmentFiles(
        location=location, group="shop/eu", topic="orders", topic_id="id", partition=0
    )


def index(location, records=10):
    limits = SegmentLimits(records=records)
    return DeliverAfterIndex(Cursor.start(0), 0, files=files(location), limits=limits)


def entries(count, first_ms=1_000_000):
    """Return entries due in the order of their offsets, 1 ms apart."""
    found = np.empty(count, ENTRY)
    found["deliver_after_ms"] = first_ms + np.arange(count)
    found["offset"] = np.arange(count)
    return found


def found_in(store, suffix=".parquet"):
    system, _ = store
    selector = fs.FileSelector(f"{BUCKET}/index", recursive=True, allow_not_found=True)
    return sorted(each.path for each in system.get_file_info(selector) if suffix in each.path)


def test_closed_segments_are_in_the_store_and_leave_memory(store):
    _, location = store
    filled = index(location)
    filled.append(entries(100), 0)
    eventually(lambda: len(found_in(store)) == 10, "not all segments were written")
    before = filled.nbytes
    eventually(lambda: filled.take(0, 1) and filled.nbytes < before, "nothing left memory")
    again = index(location)
    for segment in files(location).segments(0):
        again.adopt(segment)
    assert again.take(2_000_000, 1_000).entries.tolist() == entries(100).tolist()


def test_damaged_and_delivered_files_are_removed(store):
    system, location = store
    filled = index(location)
    filled.append(entries(30), 0)
    eventually(lambda: len(found_in(store)) == 3, "not all segments were written")
    with system.open_output_stream(found_in(store)[1]) as file:
        file.write(b"PAR1")
    assert [each.start for each in files(location).segments(0)] == [0, 20]
    eventually(lambda: len(found_in(store)) == 2, "the damaged one is still there")
    filled.take(2_000_000, 1_000)
    filled.free(30)
    eventually(lambda: not found_in(store), "unneeded files are left")


def test_an_unavailable_store_delays_nothing():
    filled = index(url(free_port()))
    started_s = time.monotonic()
    filled.append(entries(20), 0)
    assert filled.take(2_000_000, 1_000).entries.tolist() == entries(20).tolist()
    assert time.monotonic() - started_s < PROMPT_S


@pytest.mark.slow
@pytest.mark.system
def test_a_restarted_consumer_reads_the_store_instead_of_the_log(topic, now_ms, store):
    _, location = store
    own = {"delayed_index_location": location, "delayed_segment_records": 100}
    topic.send_old(now_ms, 1_000)
    with topic.reader(**own, enable_auto_commit=False) as consumer:
        expected = values(read(consumer, 1_000))
        eventually(lambda: len(found_in(store)) == 10, "not all segments were written")
    with topic.reader(**own) as consumer:
        assert values(read(consumer, 1_000)) == expected
        # Only the due records are read again, and not the index.
        assert consumer.metrics().read_again >= 1_000
        consumer.commit(asynchronous=False)
        eventually(lambda: not found_in(store), "unneeded files are left")
