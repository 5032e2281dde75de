"""Bytes in JSON, which has only text: as they are where they are UTF-8, else in base64."""

import base64
import binascii

from duetime.errors import InvalidMessage, Reason


def payload_json(name: str, data: bytes | None) -> dict[str, str | None]:
    """As text where it is UTF-8, else in base64 under a name that says so."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data or b"").decode()}


def from_base64(text: str, what: str) -> bytes:
    """The bytes; `what` names them where they cannot be read. Raises InvalidMessage."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidMessage(
            Reason.UNREADABLE, f"{what} is no base64: use the standard alphabet, and padding"
        ) from None
