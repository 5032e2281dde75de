"""The envelope of Airtel's delay service: one JSON object on `event_delayer_publisher`."""

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.columns import HEADERS_TYPE, header
from duetime.envelopes import (
    Canonical,
    Refusal,
    record_headers,
    whole_number,
    without,
)
from duetime.envelopes.json_text import JsonEnvelope
from duetime.errors import Reason
from duetime.message import ADDRESS, DUE_CALLBACK

_FIELDS = (
    "topic string, key string, value string, headers map<string,string>, "
    "postTime string, failurePostCallbackUrl string"
)


def airtel() -> Canonical:
    """`{"topic", "key"?, "value", "headers"?, "postTime" (epoch ms), "failurePostCallbackUrl"?}`.

    `value` is delivered as its JSON text exactly as sent; a string as its own bytes; null as null.
    """
    envelope = JsonEnvelope("airtel", _FIELDS, payload="value")
    url = envelope.field("failurePostCallbackUrl")
    callback = F.when(url.isNotNull(), F.array(header(DUE_CALLBACK, url))).otherwise(
        F.array().cast(HEADERS_TYPE)
    )
    post_time = envelope.field("postTime")
    return Canonical(
        topic=envelope.field("topic"),
        due_ms=whole_number(post_time),
        unique=F.lit(None).cast("string"),
        key=envelope.field("key").cast("binary"),
        value=envelope.payload(),
        headers=F.concat(without(record_headers(), ADDRESS), _own_headers(envelope), callback),
        parsed=envelope.parsed,
        refusals=(
            *envelope.refusals(),
            Refusal(
                when=post_time.isNull(),
                reason=Reason.NO_DUE_TIME,
                detail="the field postTime is missing: add it, in epoch ms",
            ),
            Refusal(
                when=envelope.repeats("postTime"),
                reason=Reason.TWO_DUE_TIMES,
                detail="the field postTime is there more than once: leave one",
            ),
        ),
    )


def _own_headers(envelope: JsonEnvelope) -> Column:
    """The envelope's field `headers`, as Kafka headers."""
    given = envelope.field("headers")
    others = F.filter(F.map_entries(given), lambda one: ~one["key"].isin(*ADDRESS))
    headers = F.transform(
        others,
        lambda one: F.struct(one["key"].alias("key"), one["value"].cast("binary").alias("value")),
    )
    # Most have none, and the lambdas are interpreted.
    return F.when(given.isNotNull(), headers).otherwise(F.array()).cast(HEADERS_TYPE)
