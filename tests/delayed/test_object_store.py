"""Index files in an object store: a server that speaks S3 as Amazon's does, on loopback."""

import subprocess
import sys
import time

import numpy as np
import pytest
from pyarrow import fs
from tests.conftest import eventually
from tests.delayed.conftest import PATIENCE_S, read, values

from duetime.delayed.cursor import Cursor
from duetime.delayed.entries import ENTRY
from duetime.delayed.files import SegmentFiles
from duetime.delayed.index import DeliverAfterIndex, Limits
from duetime.local.ports import free_port

BUCKET = "duetime"

#: More than it takes to hand a file over, in seconds, and less than to find that nobody answers.
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
    """Its port."""
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
    """The store, and where index files are in it."""
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
    limits = Limits(records=records)
    return DeliverAfterIndex(Cursor.start(0), 0, files=files(location), limits=limits)


def entries(count, first_ms=1_000_000):
    """Due in the order of their offsets, a ms apart."""
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


def test_a_damaged_file_is_removed_and_those_that_are_done_with_too(store):
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
    eventually(lambda: not found_in(store), "files are left that nobody needs")


def test_a_store_that_is_away_holds_up_nothing():
    filled = index(url(free_port()))
    begun_s = time.monotonic()
    filled.append(entries(20), 0)
    assert filled.take(2_000_000, 1_000).entries.tolist() == entries(20).tolist()
    assert time.monotonic() - begun_s < PROMPT_S


@pytest.mark.system
def test_a_consumer_that_starts_again_reads_the_store_instead_of_the_log(topic, now_ms, store):
    _, location = store
    own = {"delayed_index_location": location, "delayed_segment_records": 100}
    topic.send_old(now_ms, 1_000)
    with topic.reader(**own, enable_auto_commit=False) as consumer:
        expected = values(read(consumer, 1_000))
        eventually(lambda: len(found_in(store)) == 10, "not all segments were written")
    with topic.reader(**own) as consumer:
        assert values(read(consumer, 1_000)) == expected
        # Not the index, only the records, once they are due.
        assert consumer.metrics().read_again >= 1_000
        consumer.commit(asynchronous=False)
        eventually(lambda: not found_in(store), "files are left that nobody needs")
