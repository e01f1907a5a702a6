"""`/openapi.json`, made of the table of endpoints and the Structs of their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from runstate.errors import STATUSES
from runstated.http.call import Answer, Endpoint, Nothing
from runstated.http.errors import ONLY_HERE

REFERENCE = "#/components/schemas/{name}"
REFUSALS = {
    400: "A field is wrong; the message names it",
    401: "The key is missing or not known",
    403: "The key does not allow this, or the host is not the daemon's",
    404: "There is no such thing",
    405: "The path does not have this method",
    408: "The body did not arrive in time: send it again",
    409: "It conflicts with what there is: see the code",
    410: "The cursor is too old, or of another database",
    415: "The body is compressed",
    429: "There is nothing left of it now",
    500: "The daemon failed",
}
NOT_READY = "The daemon is about to stop, or cannot write: send the same again"


class Told(msgspec.Struct, rename="camel"):
    code: Annotated[str, Meta(extra_json_schema={"enum": sorted({*ONLY_HERE, *STATUSES})})]
    message: str
    request_id: str


class Envelope(msgspec.Struct):
    """What a refusal looks like."""

    error: Told


class Detail(msgspec.Struct):
    """Why the daemon is not ready."""

    detail: str


class Health(msgspec.Struct):
    status: str


def document(table: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """The whole document."""
    rows = list(table)
    answers = [answer for row in rows for answer in row.answers.values() if answer is not None]
    kinds: dict[Any, None] = dict.fromkeys([*answers, *(row.body for row in rows), Envelope, Detail, Health])
    schemas, parts = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    schema_of: dict[Any, Any] = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        operation = _operation(row, schema_of, parts)
        paths.setdefault("/v1/spaces/{spaceId}" + row.path, {})[row.method.lower()] = operation
    for path, told, content in (
        ("/healthz", "Whether the daemon can write and read", {"application/json": {"schema": schema_of[Health]}}),
        ("/metrics", "For Prometheus", {"text/plain": {"schema": {"type": "string"}}}),
        ("/openapi.json", "This document", {"application/json": {"schema": {"type": "object"}}}),
    ):
        responses = {"200": {"description": "OK", "content": content}, **_refusals(schema_of)}
        paths[path] = {"get": {"summary": told, "operationId": path.strip("/").split(".")[0], "responses": responses}}
    paths["/healthz"]["get"]["security"] = []
    return _with_plain_names(
        {
            "openapi": "3.1.0",
            "info": {"title": "runstated", "version": version},
            "security": [{"key": []}],
            "components": {"schemas": parts, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
            "paths": paths,
        }
    )


def _with_plain_names(found: dict[str, Any]) -> dict[str, Any]:
    """Classes of one name in two modules come as ``runstated.http.once.Renew``: that becomes ``OnceRenew``."""
    text = msgspec.json.encode(found).decode()
    for name in found["components"]["schemas"]:
        if "." in name:
            module, kind = name.split(".")[-2:]
            text = text.replace(f'"{name}":', f'"{module.title()}{kind}":').replace(
                f'/{name}"', f'/{module.title()}{kind}"'
            )
    plain: dict[str, Any] = msgspec.json.decode(text)
    return plain


def _operation_id(row: Endpoint) -> str:
    """The method and the words of the path: ``postOnceAcquire``."""
    words = re.findall(r"[a-z]+", re.sub(r"{\w+}", "", row.path))
    return row.method.lower() + "".join(word.title() for word in words)


def _operation(row: Endpoint, schema_of: dict[Any, Any], parts: dict[str, Any]) -> dict[str, Any]:
    names = ["spaceId", *re.findall(r"{(\w+)}", row.path)]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    operation: dict[str, Any] = {
        "summary": (row.handle.__doc__ or row.path).strip().splitlines()[0],  # `python -OO` strips docstrings
        "operationId": _operation_id(row),
        "parameters": parameters,
        "responses": {
            **{str(status): _success(answer, schema_of) for status, answer in row.answers.items()},
            **_refusals(schema_of),
        },
    }
    if row.method == "GET":
        body = parts[schema_of[row.body]["$ref"].rpartition("/")[2]]  # two modules may name their bodies alike
        required = set(body.get("required", ()))
        for name, schema in body.get("properties", {}).items():
            parameters.append({"name": name, "in": "query", "required": name in required, "schema": schema})
    else:
        key = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"}
        parameters.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": key})
        content = {"application/json": {"schema": schema_of[row.body]}}
        operation["requestBody"] = {"required": row.body is not Nothing, "content": content}
    return operation


def _success(answer: type[Answer] | None, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if answer is None:
        return {"description": "Nothing within the wait"}
    return {"description": "OK", "content": {"application/json": {"schema": schema_of[answer]}}}


def _refusals(schema_of: dict[Any, Any]) -> dict[str, Any]:
    envelope = {"application/json": {"schema": schema_of[Envelope]}}
    refused = {str(status): {"description": told, "content": envelope} for status, told in REFUSALS.items()}
    return {
        **refused,
        "503": {"description": NOT_READY, "content": {"application/json": {"schema": schema_of[Detail]}}},
    }
