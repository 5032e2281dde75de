"""What Aerospike's connector says, and what is done about it."""

import base64
import json

import pytest

from duetime.pipeline.notices import Notice, deleted, notice_of

DIGEST = bytes(range(20))


def told(msg="delete", *, user_key="000000000011-m", digest=DIGEST, **bins):
    """The connector's flat JSON: the key and value of its record."""
    about = {"namespace": "test", "set": "kafka_message_id"}
    about["digest"] = base64.b64encode(digest).decode()
    if user_key is not None:
        about["userKey"] = user_key
    return json.dumps(about).encode(), json.dumps(
        {**bins, "metadata": {"msg": msg, **about}}
    ).encode()


def test_a_removed_id_names_its_message():
    assert notice_of(*told()) == Notice("000000000011-m", DIGEST)


def test_a_write_is_ignored():
    assert notice_of(*told("write", id="000000000011-m")) is None


def test_without_a_user_key_there_is_the_digest():
    assert notice_of(*told(user_key=None)) == Notice(None, DIGEST)


def test_the_user_key_may_be_in_the_records_key_only():
    key, _ = told()
    _, value = told(user_key=None)
    assert notice_of(key, value) == Notice("000000000011-m", DIGEST)


@pytest.mark.parametrize(
    "value",
    [None, b"", b"\xff", b"[]", b"17", b"{}", b'{"metadata": 1}', b'{"metadata": {}}', b"null"],
)
def test_what_is_no_notice_is_ignored(value):
    assert notice_of(b"k", value) is None


@pytest.mark.parametrize("metadata", [{"userKey": 17}, {"digest": "?"}, {"digest": 5}])
def test_a_notice_of_something_else_stops_nothing(metadata):
    value = json.dumps({"metadata": {"msg": "delete", **metadata}}).encode()
    found = notice_of(None, value)
    assert found is None or found == Notice(None, None)


def test_a_notice_that_comes_twice_is_one():
    assert deleted([told(), told(), told("write"), (None, None), told(user_key="x")]) == [
        Notice("000000000011-m", DIGEST),
        Notice("x", DIGEST),
    ]
