"""Golden records as rows of a Kafka source."""

from datetime import UTC, datetime, timedelta

NOW_MS = 1_800_000_000_000


def raw(text):
    """Bytes as the files write them: text, `hex:` and digits, or nothing for null."""
    if text is None:
        return None
    return bytes.fromhex(text[4:]) if text.startswith("hex:") else text.encode()


def pairs(headers):
    return [(name, raw(value[0] if value else None)) for name, *value in headers]


def value_of(case):
    value = raw(case.get("value"))
    if "value_fill" in case:
        return value.replace(b"VALUE", b"x" * case["value_fill"])
    return value and value * case.get("value_times", 1)


def record(offset, case):
    since_epoch = timedelta(milliseconds=case.get("timestamp_ms", NOW_MS))
    headers = pairs(case.get("headers", ())) or None
    stamped = datetime(1970, 1, 1, tzinfo=UTC) + since_epoch
    return (case["topic"], 0, offset, stamped, raw(case.get("key")), value_of(case), headers)


def headers_of(row):
    return [(one.key, None if one.value is None else bytes(one.value)) for one in row.headers]


def payload(row):
    return tuple(None if each is None else bytes(each) for each in (row.key, row.value))
