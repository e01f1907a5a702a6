"""The way of an HTTP call: host, path, key, body, endpoint, envelope.

Anything a web page could send to a local port is refused: the host must be ours, every call but `/healthz` needs a key
in a header that no form can set, and there is no CORS. Paths are routed as they were sent and decoded part by part, so
that a name may have a slash.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from runstated.domain.access import Access
from runstated.http import allowances, body, budgets, claims, once, permits, queues, runs, timing, waiting, watch
from runstated.http.call import TABLE, Answer, Call, Endpoint
from runstated.http.errors import ApiError, ClientGone, NotReady
from runstated.http.gateway import Gateway
from runstated.http.health import Health
from runstated.http.hosts import Hosts
from runstated.http.metrics import Metrics
from runstated.http.openapi import document
from runstated.http.waiters import Waiters

log = logging.getLogger(__name__)

NOUNS = (
    runs,
    once,
    claims,
    allowances,
    permits,
    budgets,
    queues,
    timing,
    waiting,
    watch,
)  # each has entered its rows
KEY_CHARS_MAX = 255
JSON = "application/json"


class App:
    """The ASGI application."""

    def __init__(self, gateway: Gateway, hosts: Hosts, version: str) -> None:
        self._gateway = gateway
        self._waiters = Waiters(gateway)
        self._hosts = hosts
        self.admit: Callable[[tuple[Any, ...], str], str | None] = lambda peer, key: None  # see Acceptor
        self._health = Health(gateway.engine)
        self._metrics = Metrics(gateway)
        self._document = msgspec.json.encode(document(TABLE, version))
        routes = [
            Route("/healthz", self._answered(self._healthz, keyed=False), methods=["GET"]),
            Route("/metrics", self._answered(self._show_metrics), methods=["GET"]),
            Route("/openapi.json", self._answered(self._show_document), methods=["GET"]),
            # Parts that are words come before those that are ids: `/tasks/admit` is no task.
            *(self._route(row) for row in sorted(TABLE, key=lambda row: row.path)),
        ]
        self._app: ASGIApp = Starlette(
            routes=routes, exception_handlers={HTTPException: self._no_route, 500: self._fault}
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # The router must see the path as it was sent: a name may have a slash, spelt %2F.
            scope = {**scope, "path": scope["raw_path"].partition(b"?")[0].decode("latin-1"), "root_path": ""}
            scope.setdefault("state", {})["request_id"] = f"req-{secrets.token_hex(8)}"
        await self._app(scope, receive, send)

    # ------------------------------------------------------------------ before an endpoint

    def _answered(
        self, work: Callable[[Request, Access | None], Awaitable[Response]], *, keyed: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:
        """Checks host and key, and turns what is raised into an answer."""

        async def handle(request: Request) -> Response:
            try:
                self._check_host(request)
                response = await work(request, self._access(request) if keyed else None)
            except ApiError as error:
                response = _envelope(request, error)
            except NotReady as error:
                response = _json(503, {"detail": str(error)}, {"Retry-After": "1"})
            except (ClientGone, ClientDisconnect):
                response = Response(status_code=499)  # nobody reads it
            if "content-length" in request.headers and "transfer-encoding" in request.headers:
                response.headers["Connection"] = "close"  # where the next request begins is anybody's guess (RFC 9112)
            self._metrics.count(request.scope, response.status_code)
            return response

        return handle

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if not self._hosts.has(host):
            raise ApiError(
                "FORBIDDEN",
                f"the host {host[:100]!r} is not one of this daemon's: use one of {self._hosts}, or start it with"
                " --http-hosts",
            )

    def _access(self, request: Request) -> Access:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        keyring = self._gateway.engine.keyring
        access = keyring.find(secret) if secret.isascii() else None
        if access is None:
            raise ApiError("UNAUTHENTICATED", keyring.refusal(secret or None))
        peer = request.scope.get("client")
        no_place = self.admit(peer, access.key) if peer else None
        if no_place is not None:
            raise NotReady(no_place)
        return access

    # ------------------------------------------------------------------ endpoints

    def _route(self, row: Endpoint) -> Route:
        async def work(request: Request, access: Access | None) -> Response:
            assert access is not None, "every endpoint needs a key"
            path = {name: _unquoted(value) for name, value in request.path_params.items()}
            space = path.pop("spaceId")
            if access.space != space:
                raise ApiError("FORBIDDEN", f"the key {access.key} is not one of the space {space[:100]}")
            raw = b"" if row.method == "GET" else await body.read(request, self._gateway.engine)
            call = Call(
                gateway=self._gateway,
                waiters=self._waiters,
                access=access,
                request=request,
                path=path,
                body=body.of_query(request, row.body) if row.method == "GET" else body.of_json(raw, row.body),
                idempotency_key=_idempotency_key(request),
            )
            self._access(request)  # once more: the body may have taken its time
            try:
                status, answer = await row.handle(call)
            except ApiError as error:
                if error.code in ("VALIDATION_FAILED", "NOT_FOUND", "CONFLICT"):
                    error.args = (str(error) + body.unknown_fields(raw, row.body),)
                raise
            response = Response(status_code=status) if answer is None else _json(status, answer)
            kept_s = self._gateway.keeps_for_s(access) if call.idempotency_key else None
            if kept_s is not None:
                response.headers["Idempotency-Kept-Seconds"] = str(kept_s)
            return response

        route = Route("/v1/spaces/{spaceId}" + row.path, self._answered(work), methods=[row.method])
        route.methods = {row.method}  # without the HEAD that comes with a GET: an endpoint has one method
        return route

    async def _healthz(self, request: Request, access: Access | None) -> Response:
        trouble = await self._health.check()
        return _json(503, {"detail": trouble}, {"Retry-After": "1"}) if trouble else _json(200, {"status": "ok"})

    async def _show_metrics(self, request: Request, access: Access | None) -> Response:
        assert access is not None, "it needs a key"
        text, kind = await self._metrics.text(access)
        return Response(text, media_type=kind)

    async def _show_document(self, request: Request, access: Access | None) -> Response:
        return Response(self._document, media_type=JSON)

    # ------------------------------------------------------------------ what has no endpoint

    async def _no_route(self, request: Request, error: Exception) -> Response:
        """Unknown paths and methods. Whoever has no key is told nothing about paths."""
        assert isinstance(error, HTTPException)

        async def work(request: Request, access: Access | None) -> Response:
            if error.status_code == 405:
                raise ApiError("METHOD_NOT_ALLOWED", f"{request.method} is not one of the methods of this path")
            raise ApiError("NOT_FOUND", f"there is nothing at {request.url.path[:200]}")

        response = await self._answered(work)(request)
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    async def _fault(self, request: Request, error: Exception) -> Response:
        # The route, not the path, which may hold what users work with.
        route = getattr(request.scope.get("route"), "path", "(none)")
        log.error("an HTTP call failed: %s %s (%s)", request.method, route, _request_id(request), exc_info=error)
        return _envelope(request, ApiError("INTERNAL", f"the daemon failed at this call ({type(error).__name__})"))


def _unquoted(text: str) -> str:
    """A part of a path. Raises ApiError for what is not UTF-8."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise ApiError("VALIDATION_FAILED", "the path is not UTF-8") from error


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not re.fullmatch(f"[!-~]{{1,{KEY_CHARS_MAX}}}", key):
        raise ApiError("VALIDATION_FAILED", f"an Idempotency-Key has 1 to {KEY_CHARS_MAX} visible ASCII characters")
    return key


def _json(status: int, content: Answer | dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, headers=headers, media_type=JSON)


def _request_id(request: Request) -> str:
    found: str = request.scope["state"]["request_id"]
    return found


def _envelope(request: Request, error: ApiError) -> Response:
    told = {"code": error.code, "message": str(error), "requestId": _request_id(request)}
    response = _json(error.status, {"error": told}, error.headers)
    if error.status == 408:
        response.headers["Connection"] = "close"
    return response
