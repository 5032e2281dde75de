"""Expirations in the records of Aerospike's connector."""

import base64
import json

import pytest

from duetime.pipeline.store_queries import Expiration, expirations, parse_expiration

DIGEST = bytes(range(20))


def reported(msg="delete", *, user_key="000000000011-m", digest=DIGEST, **bins):
    """The connector's flat JSON: the key and value of its record."""
    about = {"namespace": "test", "set": "kafka_message_id"}
    about["digest"] = base64.b64encode(digest).decode()
    if user_key is not None:
        about["userKey"] = user_key
    return json.dumps(about).encode(), json.dumps(
        {**bins, "metadata": {"msg": msg, **about}}
    ).encode()


def test_a_removed_id_names_its_message():
    assert parse_expiration(*reported()) == Expiration("000000000011-m", DIGEST)


def test_a_write_is_ignored():
    assert parse_expiration(*reported("write", id="000000000011-m")) is None


def test_without_a_user_key_there_is_the_digest():
    assert parse_expiration(*reported(user_key=None)) == Expiration(None, DIGEST)


def test_the_user_key_may_be_in_the_key_of_the_record_only():
    key, _ = reported()
    _, value = reported(user_key=None)
    assert parse_expiration(key, value) == Expiration("000000000011-m", DIGEST)


@pytest.mark.parametrize(
    "value",
    [None, b"", b"\xff", b"[]", b"17", b"{}", b'{"metadata": 1}', b'{"metadata": {}}', b"null"],
)
def test_records_that_report_no_removal_are_ignored(value):
    assert parse_expiration(b"k", value) is None


@pytest.mark.parametrize("metadata", [{"userKey": 17}, {"digest": "?"}, {"digest": 5}])
def test_an_unexpected_removal_stops_nothing(metadata):
    value = json.dumps({"metadata": {"msg": "delete", **metadata}}).encode()
    found = parse_expiration(None, value)
    assert found is None or found == Expiration(None, None)


def test_a_repeated_expiration_is_one():
    assert expirations(
        [reported(), reported(), reported("write"), (None, None), reported(user_key="x")]
    ) == [
        Expiration("000000000011-m", DIGEST),
        Expiration("x", DIGEST),
    ]
