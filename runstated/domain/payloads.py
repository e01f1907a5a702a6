"""Inputs and results: JSON text that the daemon never parses, and whose size it checks."""

from runstate import wire
from runstated.domain.answers import ValidationFailed


def check(what: str, payload: str) -> None:
    """Raises ValidationFailed for JSON text above PAYLOAD_BYTES_MAX bytes of UTF-8."""
    if len(payload) > wire.PAYLOAD_BYTES_MAX // 4 and len(payload.encode()) > wire.PAYLOAD_BYTES_MAX:
        raise ValidationFailed(f"{what} exceeds {wire.PAYLOAD_BYTES_MAX} bytes")
