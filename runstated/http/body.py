"""What a client sends: its body or query, read into the Struct of its endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from runstated.engine.engine import Engine
from runstated.http.call import Body
from runstated.http.errors import ApiError

BYTES_MAX = 2 * 1024 * 1024
TIME_MS = 10_000  # a client that has not sent its body by now sends nothing


def of_query(request: Request, kind: type[Body]) -> Body:
    """The query. Raises ApiError."""
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in query:
            raise ApiError("VALIDATION_FAILED", f"{name}: given twice")
        query[name] = value
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError("VALIDATION_FAILED", _told(error, "query")) from error


def of_json(raw: bytes, kind: type[Body]) -> Body:
    """The body. Raises ApiError."""
    try:
        return _decoded(raw.strip() or b"{}", kind)
    except msgspec.ValidationError as error:
        raise ApiError("VALIDATION_FAILED", _told(error, "body")) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError("VALIDATION_FAILED", f"the body is not strict JSON: {error}") from error


def _decoded(raw: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        return msgspec.json.decode(raw, type=kind, strict=False)  # JSON has one kind of number: 30.0 is 30


async def read(request: Request, engine: Engine) -> bytes:
    """The bytes of the body. Raises ApiError."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        raise ApiError("UNSUPPORTED_MEDIA_TYPE", f"Content-Encoding {coding[:40]!r} is not supported: send it as it is")

    async def all_parts() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > BYTES_MAX:
                raise ApiError("VALIDATION_FAILED", f"the body exceeds {BYTES_MAX} bytes")
        return bytes(body)

    reading = asyncio.ensure_future(all_parts())
    timer = engine.after(TIME_MS, reading.cancel)  # not wait_for: what the daemon sleeps is not the client's
    try:
        await asyncio.wait((reading,))
    finally:
        timer.cancel()
        reading.cancel()
    if reading.cancelled():
        raise ApiError("REQUEST_TIMEOUT", f"the body did not arrive within {TIME_MS // 1000} s: send it again")
    raw = reading.result()
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise ApiError("VALIDATION_FAILED", "the body is not UTF-8") from error
    return raw


def unknown_fields(raw: bytes, kind: type[Body]) -> str:
    """What a refusal adds when the body has fields that the endpoint does not know: one of them may be what was
    meant. Empty if there are none."""
    try:
        sent: Any = msgspec.json.decode(raw.strip() or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    unknown = [name for name in sent if name not in known] if isinstance(sent, dict) else []
    if not unknown:
        return ""
    taken = f"it takes {', '.join(known)}" if known else "it takes none"
    return f" (this call does not know the field {', '.join(repr(name[:40]) for name in unknown[:5])}; {taken})"


def _told(error: msgspec.ValidationError, place: str) -> str:
    """msgspec names the field as `$.leaseSeconds`."""
    text, _, field = str(error).partition(" - at `")
    return f"{field.rstrip('`').removeprefix('$.') or place}: {text}" if field else f"{place}: {text}"
