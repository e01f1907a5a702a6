"""What a request is refused with: the envelope ``{"error": {"code", "message", "requestId"}}``."""

from runstate import wire
from runstate.errors import STATUSES

ONLY_HERE = {
    "STALE_CLAIM": 409,
    "CLAIM_HELD": 409,
    "CAPACITY_UNAVAILABLE": 409,
    "ALLOWANCE_EXHAUSTED": 429,
    "CURSOR_EXPIRED": 410,
    "METHOD_NOT_ALLOWED": 405,
    "REQUEST_TIMEOUT": 408,
    "UNSUPPORTED_MEDIA_TYPE": 415,
}
WORDS = {"attempts=": "maxAttempts="}  # words of the wire in messages that have another name here
CODES = {"LEASE_LOST": "STALE_CLAIM", "DEADLOCK": "CONFLICT"}  # codes of the wire that have another name here
OTHER_REQUEST = "this Idempotency-Key was used for another request"


class ApiError(Exception):
    """A request that is refused; ``code`` is one of the HTTP API's. ``retry_after_s``: when it may succeed."""

    def __init__(self, code: str, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.code = code
        self.status = ONLY_HERE.get(code) or STATUSES.get(code, 500)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Those that go with the status."""
        if self.status == 401:
            return {"WWW-Authenticate": 'Bearer realm="runstated"'}
        return {"Retry-After": str(self.retry_after_s)} if self.status == 429 else {}


class NotReady(Exception):
    """The daemon is about to stop, or cannot write: the client is to send the same again. Answered with 503 and a body
    that is no envelope, which makes the SDK do so by itself."""


class ClientGone(Exception):
    """Nobody is there any more who would read an answer."""


def from_wire(error: wire.Error) -> Exception:
    """The exception for a refusal of the wire."""
    if error.code == "UNAVAILABLE":
        return NotReady(error.message)
    if error.code == "IDEMPOTENCY_CONFLICT":
        return ApiError(error.code, OTHER_REQUEST)
    message = error.message
    for word, here in WORDS.items():
        message = message.replace(word, here)
    return ApiError(CODES.get(error.code, error.code), message)
