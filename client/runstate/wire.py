"""The wire: every request, reply, push and error code, in the order of the domain.

This file is the one place where the protocol between a client and the daemon is defined; PROTOCOL.md explains it to
people who write a client in another language. A frame (see framing.py) carries a request id and one of the Structs
below as a msgpack map. Requests carry the key ``verb``, replies ``reply``, pushes ``push``. A field that holds its
default value may be left out, and unknown fields are ignored, so that versions can differ.

Shapes used throughout: times are milliseconds (``*_ms``); points in time are Unix time; tokens are integers; payloads
(``input``, ``result``) are JSON *text* of at most 65,536 bytes of UTF-8, which the daemon never parses; ``secret``: 64
random bits in hexadecimal digits that come with a hold and prove it from any session ("": the caller's own holds it).

A request with id 0 wants no reply. A request that may wait has ``wait_ms`` (None: no limit, 0: do not wait),
``within``: the tokens that the caller holds while it asks, outermost first, and ``inherited``: those held by whoever
has started it (a task inside of a hold) and need not wait for it: they count for its age only.
"""

import hashlib
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from .context import WITHIN_MAX as WITHIN_MAX
from .payloads import PAYLOAD_BYTES_MAX as PAYLOAD_BYTES_MAX

PROTOCOL = 1
PROTOCOL_MIN = 1

LEASE_MS_MIN = 5_000
LEASE_MS_MAX = 600_000
LATEST_MS = 253_402_300_799_999  # the end of the year 9999, the last one that dates can say in every language
NUMBER_MAX = 2**63 - 1
SENT_MAX = 250  # jobs in one request: some 10 ms of the daemon
LISTED_MAX = 1_000  # tokens in a beat, calls in an ack: more go in several messages
RUNS_MAX = 2_000  # in a hello
HELD_MAX = 10_000  # leases of one session
WAITING_MAX = 10_000  # calls of one session that wait
SETTLE_BY_MS = 3_600_000  # within this time a reservation is to be settled
PERMISSIONS: tuple["Permission", ...] = (
    "work",
    "resource_config",
    "usage",
)  # what a key may do: PROTOCOL.md, "Keys and spaces"

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Key = Annotated[str, Meta(min_length=1, max_length=512)]
Id = Annotated[str, Meta(min_length=1, max_length=64)]
Label = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=4_000)]
Traceback = Annotated[str, Meta(max_length=16_000)]
Token = Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]  # of a request, an event, an arrival, a job that ended
Version = Annotated[int, Meta(ge=0, le=2**31)]
Around = Annotated[tuple[Token, ...], Meta(max_length=WITHIN_MAX)]
Secret = Annotated[str, Meta(max_length=64)]
Ms = Annotated[int, Meta(ge=0, le=2**53)]
Moment = Annotated[int, Meta(ge=0, le=LATEST_MS)]
LeaseMs = Annotated[int, Meta(ge=LEASE_MS_MIN, le=LEASE_MS_MAX)]
Attempts = Annotated[int, Meta(ge=1, le=100)]
Places = Annotated[int, Meta(ge=0, le=1_000)]
Units = Annotated[int, Meta(ge=1, le=2**53)]
WindowSeconds = Annotated[int, Meta(ge=1, le=86_400)]
Minor = Annotated[int, Meta(ge=1, le=2**53)]
Permission = Literal["work", "resource_config", "usage"]
Currency = Annotated[str, Meta(min_length=3, max_length=3, pattern="^[A-Z]{3}$")]
Scale = Annotated[int, Meta(ge=0, le=9)]

R_co = TypeVar("R_co", covariant=True)


class Request(Struct, Generic[R_co], tag_field="verb", kw_only=True, omit_defaults=True, frozen=True):
    """What a client asks. Its type parameter names the replies that it can get beside ``Error``.

    ``replayed``: a repeat of this request would do harm, so its reply is kept until the client has it (the class
    attribute is not on the wire). ``reads``: it changes nothing. ``gives``: it gives something back and is run first.
    ``permission``: what the caller's key must have ("": any key will do).
    """

    replayed: ClassVar[bool] = False
    reads: ClassVar[bool] = False
    gives: ClassVar[bool] = False
    permission: ClassVar[str] = "work"

    again: bool = False  # sent before on a connection that was lost: look for a kept reply first
    keep: bool = False  # whatever the verb: its reply is kept for a day, and a repeat under this id gets the same


class WaitingRequest(Request[R_co], Generic[R_co], kw_only=True, omit_defaults=True, frozen=True):
    """A request that may have to wait."""

    wait_ms: Ms | None = None
    within: Around = ()
    inherited: Around = ()
    ticket: Number = 0  # the arrival number it was given when it was parked, on a repeat
    proof: Number = 0  # what came with it


class Reply(Struct, tag_field="reply", kw_only=True, omit_defaults=True, frozen=True):
    """What the daemon answers. ``kept`` (not on the wire): as the answer to a ``replayed`` request it is kept until the
    client has it. ``relaxed`` (not on the wire): to a process of this machine it may leave when it is written, before
    it is on disk: a power cut ends that process as well."""

    kept: ClassVar[bool] = False
    relaxed: ClassVar[bool] = False


class Push(Struct, tag_field="push", kw_only=True, omit_defaults=True, frozen=True):
    """What the daemon says unasked (request id 0). ``relaxed``: as of a reply."""

    relaxed: ClassVar[bool] = False


# ---------------------------------------------------------------------------------------------------- general


class Ok(Reply, tag="ok", frozen=True):
    """Done; there is nothing more to say."""


class Error(Reply, tag="error", frozen=True):
    """The request was refused; nothing of it was recorded. Codes: PROTOCOL.md, "Errors"."""

    code: str
    message: str
    retryable: bool = False
    run: str | None = None  # the run that is over, where that is the reason


class Parked(Push, tag="parked", frozen=True):
    """The call ``call`` waits. ``ticket`` is its arrival number, for a repeat after a lost connection, with ``proof``;
    ``behind`` names the tokens (at most 16) that hold what it waits for."""

    relaxed: ClassVar[bool] = True
    call: int
    ticket: int
    proof: int = 0
    behind: tuple[int, ...] = ()


class LeaseLost(Push, tag="lease.lost", frozen=True):
    """The hold ``token`` of this session is gone."""

    token: int
    reason: str


class RunEnded(Push, tag="run.ended", frozen=True):
    """A run that this session joined has ended."""

    run: str
    state: str
    message: str


class JobsReturn(Push, tag="jobs.return", frozen=True):
    """Others wait for these jobs, which this session has taken ahead: give back those that are not begun."""

    tokens: tuple[int, ...] = ()


class Reconnect(Push, tag="reconnect", frozen=True):
    """The daemon is about to go away in good order: reconnect and send again what is open."""


# ---------------------------------------------------------------------------------------------------- sessions


class Welcome(Reply, tag="welcome", frozen=True):
    """The session is open. ``protocol`` is the version that both sides speak from here on; ``resumed`` says that the
    daemon knew the session; ``ended`` lists those of the named runs that are over."""

    protocol: int
    version: str
    pid: int
    resumed: bool = False
    ended: tuple[RunEnded, ...] = ()


class Hello(Request[Welcome], tag="hello", frozen=True):
    """The first frame of every connection.

    ``session``: chosen by the client, random, the same on each reconnect. ``pid`` as the client sees it. ``space`` and
    ``key``: over TCP the key must be one of the space. ``runs``: the runs joined so far.
    """

    protocol: Version
    protocol_min: Version
    session: Id
    worker: Label
    pid: Annotated[int, Meta(ge=0, le=2**31)] = 0
    command: Text = ""
    space: Name = "default"
    key: Label | None = None
    runs: Annotated[tuple[Id, ...], Meta(max_length=RUNS_MAX)] = ()


class Bye(Request[Ok], tag="bye", frozen=True):
    """Ends the session: all it still holds is given back."""


class Ack(Request[Ok], tag="ack", frozen=True):
    """The replies to these requests have arrived; the daemon need not keep them any longer."""

    calls: Annotated[tuple[Number, ...], Meta(max_length=LISTED_MAX)]


class Cancel(Request[Ok], tag="cancel", frozen=True):
    """The caller of the request ``call`` has gone: it stops waiting, or what it got is given back."""

    call: Number


class Nested(Request[Ok], tag="nested", frozen=True):
    """The request ``call``, which may be waiting, is made inside of these holds from now on: its caller has come to be
    awaited in some of them, or is so no longer."""

    call: Number
    within: Around = ()
    inherited: Around = ()


class Beat(Request[Ok], tag="beat", frozen=True):
    """Renews the leases of ``tokens``, and no others. A token that is no longer held is answered with ``LeaseLost``."""

    tokens: Annotated[tuple[Token, ...], Meta(max_length=LISTED_MAX)]


class Released(Reply, tag="released", frozen=True):
    """The hold is gone. ``held``: it was still held until now; a repeat says that it was not."""

    relaxed: ClassVar[bool] = True
    held: bool


class Release(Request[Released], tag="leases.release", frozen=True):
    """Gives the hold of ``token`` back without an outcome: no failure and no attempt is counted."""

    gives: ClassVar[bool] = True
    token: Token
    secret: Secret = ""


class Renewed(Reply, tag="renewed", frozen=True):
    """The lease has its full length again. ``lease_expires_ms``: an estimate in Unix time."""

    lease_expires_ms: int


class Renew(Request[Renewed], tag="leases.renew", frozen=True):
    """Renews one lease, from now on of ``lease_ms``: with its ``secret`` also from another session, for those who have
    no connection of their own. LEASE_LOST when it is gone (of a job: also when its run is over), SCOPE_CANCELLED or
    DEADLINE_EXCEEDED when the run of another hold is over."""

    token: Token
    lease_ms: LeaseMs
    secret: Secret = ""


# ---------------------------------------------------------------------------------------------------- runs


class RunView(Reply, tag="run", frozen=True):
    """A run. ``state``: active, stopped, finished or expired, by the clock."""

    kept: ClassVar[bool] = True
    run: str
    name: str | None
    state: str
    parent: str | None = None
    deadline_ms: int | None = None
    created_ms: int = 0


class RunsJoin(Request[RunView], tag="runs.join", frozen=True):
    """Joins the active root run of that name, or creates it. A run's id as the name gives that run, active or over.
    ``deadline_ms`` is set if it has none yet; one that it has stays."""

    permission: ClassVar[str] = ""
    name: Name
    deadline_ms: Moment | None = None


class RunsChild(Request[RunView], tag="runs.child", frozen=True):
    """Creates a run below ``parent``. It ends with its parent, and at the latest at its parent's deadline."""

    replayed: ClassVar[bool] = True
    parent: Id
    name: Name | None = None
    deadline_ms: Moment | None = None
    owned: bool = True  # it ends with the session that made it, unless something is held in it


class RunsEnd(Request[RunView], tag="runs.end", frozen=True):
    """Ends a run and all below it. Ending an ended run changes nothing."""

    run: Id
    state: Literal["stopped", "finished"]


class RunsGet(Request[RunView], tag="runs.get", frozen=True):
    """A run, also after its end."""

    permission: ClassVar[str] = ""
    reads: ClassVar[bool] = True
    run: Id


# ---------------------------------------------------------------------------------------------------- once


class OnceGranted(Reply, tag="once.granted", frozen=True):
    """The caller is to run the function. ``attempt`` = failures so far + 1; ``takeovers``: how often a holder has died
    or fallen silent before."""

    relaxed: ClassVar[bool] = True
    kept: ClassVar[bool] = True
    token: int
    attempt: int
    secret: str = ""
    takeovers: int = 0


class OnceDone(Reply, tag="once.done", frozen=True):
    """The result, as JSON text."""

    result: str


class OnceFailed(Reply, tag="once.failed", frozen=True):
    """The key has failed for good. ``traceback``: of its last failure, as text, where that has one."""

    attempts: int
    error: str
    traceback: str | None = None


class OnceHeld(Reply, tag="once.held", frozen=True):
    """Somebody else still runs it, and the wait is over. ``attempts``: failures so far."""

    attempts: int = 0


class OnceOpen(Reply, tag="once.open", frozen=True):
    """Nobody runs it. ``attempts``: failures so far."""

    attempts: int = 0


class OnceAcquire(
    WaitingRequest[OnceGranted | OnceDone | OnceFailed | OnceHeld], tag="once.acquire", kw_only=True, frozen=True
):
    """The result of a key, or the right to produce it."""

    replayed: ClassVar[bool] = True
    run: Id
    key: Key
    lease_ms: LeaseMs = 30_000


class OnceGet(WaitingRequest[OnceOpen | OnceHeld | OnceDone | OnceFailed], tag="once.get", kw_only=True, frozen=True):
    """How a key stands, without taking it; waits as long as somebody runs it."""

    run: Id
    key: Key


class OnceComplete(Request[OnceDone], tag="once.complete", frozen=True):
    """Records the result. Refused with LEASE_LOST when the hold is gone, with SCOPE_CANCELLED or DEADLINE_EXCEEDED when
    the run is over."""

    gives: ClassVar[bool] = True
    run: Id
    key: Key
    token: Token
    result: str
    secret: Secret = ""


class OnceFailCounted(Reply, tag="once.fail_counted", frozen=True):
    """The failure was counted. ``failed``: it was the last one allowed."""

    kept: ClassVar[bool] = True
    attempts: int
    failed: bool


class OnceFail(Request[OnceFailCounted], tag="once.fail", frozen=True):
    """Counts a failure; after ``attempts`` failures the key has failed for good."""

    gives: ClassVar[bool] = True
    replayed: ClassVar[bool] = True
    run: Id
    key: Key
    token: Token
    error: Text
    attempts: Attempts = 3
    secret: Secret = ""
    traceback: Traceback | None = None  # as text, for people


# ---------------------------------------------------------------------------------------------------- queues


class QueueView(Reply, tag="queue", frozen=True):
    """A queue and how many of its jobs in active runs are in which state (for display)."""

    queue: str
    attempts: int
    counts: dict[str, int] = {}


class UnitsNeeded(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Units of a limit or a pool of slots, by its name."""

    name: Name
    units: Units = 1


class MoneyNeeded(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """An amount of a budget, by its name, in minor units."""

    name: Name
    reserve_minor: Minor


class Needs(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What a job needs: it is started with all of it, in one step, or not at all."""

    slots: Annotated[tuple[UnitsNeeded, ...], Meta(max_length=4)] = ()
    limits: Annotated[tuple[UnitsNeeded, ...], Meta(max_length=4)] = ()
    budgets: Annotated[tuple[MoneyNeeded, ...], Meta(max_length=2)] = ()


class QueuesDeclare(Request[QueueView], tag="queues.declare", frozen=True):
    """Creates or verifies a queue. Without ``attempts`` it must exist; other attempts than the queue's: CONFLICT.

    ``needs``: what its jobs need from now on, where they do not say themselves; None leaves that as it is.
    """

    permission: ClassVar[str] = ""
    queue: Name
    attempts: Attempts | None = None
    needs: Needs | None = None


class JobView(Reply, tag="job", frozen=True):
    """A job. ``state``: ready, delayed, running, succeeded, failed or cancelled. ``reason`` says why it failed:
    ``handler_error: <Type>: <message>``, ``worker_died``, ``lease_expired``, or ``scope_cancelled`` (its run ended);
    ``traceback`` is that of a handler's last failure, as text."""

    kept: ClassVar[bool] = True
    job: str
    state: str
    attempt: int = 0
    result: str | None = None
    reason: str | None = None
    traceback: str | None = None


class QueuesSend(Request[JobView], tag="queues.send", frozen=True):
    """Submits a job. The same key in the same run is the same job, whatever has become of it. With ``attempts`` the
    queue is declared on the way. ``needs``: what this job needs (none at all, if it is empty); None: what its queue's
    workers have declared last when it starts."""

    run: Id
    queue: Name
    key: Key
    input: str
    attempts: Attempts | None = None
    needs: Needs | None = None


class NewJob(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One of several jobs."""

    key: Key
    input: str


class JobsSent(Reply, tag="jobs.sent", frozen=True):
    """The ids of jobs, in the order of the members."""

    jobs: tuple[str, ...] = ()


class QueuesSendMany(Request[JobsSent], tag="queues.send_many", frozen=True):
    """Submits many jobs of a queue, as ``QueuesSend`` does one: all of them, or it is refused as a whole."""

    run: Id
    queue: Name
    members: Annotated[tuple[NewJob, ...], Meta(min_length=1, max_length=SENT_MAX)]
    attempts: Attempts | None = None
    needs: Needs | None = None


class QueuesResult(WaitingRequest[JobView], tag="queues.result", kw_only=True, frozen=True):
    """A job; waits until it has ended."""

    job: Id


class AdmitFrom(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Take up to ``places`` jobs of ``queue`` from ``run`` and every run under it, and up to ``ahead`` more that are to
    be begun later."""

    run: Id
    queue: Name
    places: Places = 1
    lease_ms: LeaseMs = 30_000
    below: bool = True  # also from the runs under it
    ahead: Places = 0


class JobGrant(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """A job that the worker is to handle. ``source``: the index of its entry in ``QueuesAdmit.queues``."""

    token: int
    job: str
    run: str
    run_name: str | None
    key: str
    input: str
    attempt: int
    source: int = 0
    reason: str | None = None  # what ended the delivery before, as in ``JobView``
    reservations: tuple[str, ...] = ()  # of budgets, in the order of the needs
    secret: str = ""  # of the token, and of its reservations
    ahead: bool = False  # it was taken ahead: it counts as begun with ``QueuesStarted``


class JobsGranted(Reply, tag="jobs.granted", frozen=True):
    """Jobs, oldest first; none when the wait was over."""

    relaxed: ClassVar[bool] = True
    kept: ClassVar[bool] = True
    jobs: tuple[JobGrant, ...] = ()


class QueuesAdmit(WaitingRequest[JobsGranted], tag="queues.admit", kw_only=True, frozen=True):
    """Waits for work. Refused with SCOPE_CANCELLED or DEADLINE_EXCEEDED, and the run, when one of the runs is over."""

    replayed: ClassVar[bool] = True
    queues: Annotated[tuple[AdmitFrom, ...], Meta(min_length=1, max_length=256)]


class QueuesStarted(Request[Ok], tag="queues.started", frozen=True):
    """Jobs that were taken ahead are begun: deliveries that count from now on."""

    gives: ClassVar[bool] = True
    tokens: Annotated[tuple[Token, ...], Meta(max_length=LISTED_MAX)]


class QueuesComplete(Request[JobView], tag="queues.complete", frozen=True):
    """Records a job's result. LEASE_LOST when the hold is gone or the job's run is over.

    ``costs``: what was spent, by reservation, in minor units; a reservation that is not named is charged whole.
    ``keep_reserved``: the reservations stay as they are, to be settled later.
    """

    gives: ClassVar[bool] = True
    job: Id
    token: Token
    result: str
    costs: Annotated[dict[Id, Annotated[int, Meta(ge=0, le=2**53)]], Meta(max_length=16)] = {}
    keep_reserved: bool = False
    secret: Secret = ""


class QueuesFail(Request[JobView], tag="queues.fail", frozen=True):
    """Counts a failure: the job is tried again after a pause, unless its attempts are used up or ``retry`` is false."""

    gives: ClassVar[bool] = True
    replayed: ClassVar[bool] = True
    job: Id
    token: Token
    error: Text
    retry: bool = True
    secret: Secret = ""
    traceback: Traceback | None = None  # as text, for people


# ---------------------------------------------------------------------------------------------------- limits


class LimitView(Reply, tag="limit", frozen=True):
    """A limit: ``max`` units in each window of ``per_seconds``. ``used``: of the present window; ``waiting``: calls."""

    id: str
    limit: str
    max: int
    per_seconds: int
    used: int = 0
    waiting: int = 0


class LimitsDeclare(Request[LimitView], tag="limits.declare", frozen=True):
    """Creates or verifies a limit. Without sizes it must exist; other sizes than its own: CONFLICT."""

    permission: ClassVar[str] = ""
    limit: Name
    max: Units | None = None
    per_seconds: WindowSeconds | None = None


class LimitsGet(Request[LimitView], tag="limits.get", frozen=True):
    """A limit, and what is used of its present window."""

    permission: ClassVar[str] = ""
    reads: ClassVar[bool] = True
    limit: Name


class LimitTaken(Reply, tag="limit.taken", frozen=True):
    """The units are spent."""

    kept: ClassVar[bool] = True


class LimitBusy(Reply, tag="limit.busy", frozen=True):
    """There were no units, and the wait is over."""


class LimitsTake(WaitingRequest[LimitTaken | LimitBusy], tag="limits.take", kw_only=True, frozen=True):
    """Takes units of the present window, in line. With sizes the limit is declared on the way."""

    replayed: ClassVar[bool] = True
    run: Id
    limit: Name
    units: Units = 1
    max: Units | None = None
    per_seconds: WindowSeconds | None = None


# ---------------------------------------------------------------------------------------------------- slots


class SlotsView(Reply, tag="slots", frozen=True):
    """A pool of slots: at most ``max`` units are out at a time; ``used`` are, by the workers ``holders``."""

    id: str
    pool: str
    max: int
    used: int = 0
    waiting: int = 0
    holders: tuple[str, ...] = ()


class SlotsDeclare(Request[SlotsView], tag="slots.declare", frozen=True):
    """Creates or verifies a pool. Without ``max`` it must exist; another ``max`` than its own: CONFLICT."""

    permission: ClassVar[str] = ""
    pool: Name
    max: Units | None = None


class SlotsGet(Request[SlotsView], tag="slots.get", frozen=True):
    """A pool: what is used, and by whom."""

    permission: ClassVar[str] = ""
    reads: ClassVar[bool] = True
    pool: Name


class SlotsGranted(Reply, tag="slots.granted", frozen=True):
    """The units are held under the token."""

    relaxed: ClassVar[bool] = True
    kept: ClassVar[bool] = True
    token: int
    secret: str = ""


class SlotsBusy(Reply, tag="slots.busy", frozen=True):
    """There were no units, and the wait is over."""


class SlotsAcquire(WaitingRequest[SlotsGranted | SlotsBusy], tag="slots.acquire", kw_only=True, frozen=True):
    """Holds units of a pool, in line. With ``max`` the pool is declared on the way."""

    replayed: ClassVar[bool] = True
    run: Id
    pool: Name
    units: Units = 1
    lease_ms: LeaseMs = 30_000
    max: Units | None = None


# ---------------------------------------------------------------------------------------------------- budgets


class ReservationView(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One reservation. ``state``: active, settled or released."""

    reservation: str
    run: str
    state: str
    left_minor: int
    charged_minor: int


class BudgetView(Reply, tag="budget", frozen=True):
    """A budget, in minor units of its currency."""

    id: str
    budget: str
    currency: str
    scale: int
    limit_minor: int
    reserved_minor: int = 0
    spent_minor: int = 0
    reservations: tuple[ReservationView, ...] = ()


class BudgetsDeclare(Request[BudgetView], tag="budgets.declare", frozen=True):
    """Creates or verifies a budget. Without a limit it must exist; another one than its own: CONFLICT."""

    permission: ClassVar[str] = ""
    budget: Name
    limit_minor: Minor | None = None
    currency: Currency | None = None
    scale: Scale | None = None


class BudgetsGet(Request[BudgetView], tag="budgets.get", frozen=True):
    """A budget: its limit, what is reserved and what is spent; with its newest reservations, at most so many."""

    permission: ClassVar[str] = ""
    reads: ClassVar[bool] = True
    budget: Name
    reservations: Annotated[int, Meta(ge=0, le=1_000)] = 0


class BudgetReserved(Reply, tag="budget.reserved", frozen=True):
    """The amount is held. It is released when the session ends, or in an hour; charged when its process dies."""

    kept: ClassVar[bool] = True
    token: int
    reservation: str
    scale: int
    secret: str = ""


class BudgetsReserve(Request[BudgetReserved], tag="budgets.reserve", frozen=True):
    """Holds an amount. INSUFFICIENT_BUDGET when the budget cannot cover it. With a limit it is declared on the way."""

    replayed: ClassVar[bool] = True
    run: Id
    budget: Name
    amount_minor: Minor
    limit_minor: Minor | None = None
    currency: Currency | None = None
    scale: Scale | None = None
    settle_by_ms: Moment | None = None  # then what is left is released; None: in an hour


class BudgetSettled(Reply, tag="budget.settled", frozen=True):
    """How a reservation stands. ``state``: active, settled or released."""

    state: str
    charged_minor: int
    left_minor: int


class BudgetsSettle(Request[BudgetSettled], tag="budgets.settle", frozen=True):
    """Charges a cost; a repeat with the same ``work_key`` changes nothing. What is left is released, unless
    ``keep_rest``. More than was reserved is charged as far as the budget reaches."""

    gives: ClassVar[bool] = True
    reservation: Id
    cost_minor: Annotated[int, Meta(ge=0, le=2**53)]
    work_key: Key
    keep_rest: bool = False
    overrun: bool = True  # False: CONFLICT for more than was reserved
    late: bool = True  # False: CONFLICT when nothing is reserved any more
    secret: Secret = ""  # that of the token under which it was reserved


class BudgetsRelease(Request[BudgetSettled], tag="budgets.release", frozen=True):
    """Releases what is left of a reservation."""

    gives: ClassVar[bool] = True
    reservation: Id
    late: bool = True  # False: CONFLICT when nothing is reserved any more
    secret: Secret = ""


# ---------------------------------------------------------------------------------------------------- groups


class GroupView(Reply, tag="group", frozen=True):
    """A group: the run that was made for it, and the jobs in the order of the members."""

    kept: ClassVar[bool] = True
    run: str
    jobs: tuple[str, ...]


class GroupsSubmit(Request[GroupView], tag="groups.submit", frozen=True):
    """Submits jobs in a run of their own, below ``run``. It ends with the session that made it."""

    replayed: ClassVar[bool] = True
    run: Id
    queue: Name
    members: Annotated[tuple[NewJob, ...], Meta(max_length=100)] = ()
    attempts: Attempts | None = None
    needs: Needs | None = None
    owned: bool = True  # it ends with the session that made it


class GroupEnded(Reply, tag="group.ended", frozen=True):
    """The jobs that have ended since the cursor, in that order; none when the wait was over."""

    jobs: tuple[JobView, ...] = ()
    cursor: int = 0


class GroupsEnded(WaitingRequest[GroupEnded], tag="groups.ended", kw_only=True, frozen=True):
    """Waits until a job of the group has ended that had not at ``after``."""

    run: Id
    after: Number = 0


# ---------------------------------------------------------------------------------------------------- timers, barriers


class TimerView(Reply, tag="timer", frozen=True):
    """A timer."""

    kept: ClassVar[bool] = True
    fired: bool
    fire_ms: int
    acked: bool = False


class TimersSleep(WaitingRequest[TimerView], tag="timers.sleep", kw_only=True, frozen=True):
    """Waits for the timer of that name in the run. The first call fixes when it fires: either ``after_ms`` from now or
    ``at_ms`` in Unix time."""

    run: Id
    name: Name
    after_ms: Ms | None = None
    at_ms: Moment | None = None


class TimersAck(Request[TimerView], tag="timers.ack", frozen=True):
    """Somebody has gone on after a timer has fired. CONFLICT when it has not, or somebody has said so before."""

    replayed: ClassVar[bool] = True
    run: Id
    name: Name


class BarrierView(Reply, tag="barrier", frozen=True):
    """A barrier."""

    released: bool
    target: int
    arrivals: int


class BarriersDeclare(Request[BarrierView], tag="barriers.declare", frozen=True):
    """Creates or verifies a barrier, without arriving at it. Another count than before: CONFLICT."""

    run: Id
    name: Name
    count: Units


class BarriersGet(Request[BarrierView], tag="barriers.get", frozen=True):
    """How a barrier stands. SCOPE_CANCELLED or DEADLINE_EXCEEDED when its run is over."""

    reads: ClassVar[bool] = True
    run: Id
    name: Name


class BarriersArrive(WaitingRequest[BarrierView], tag="barriers.arrive", kw_only=True, frozen=True):
    """Counts ``worker`` and waits until ``count`` different ones have come. Another count than before: CONFLICT."""

    run: Id
    name: Name
    count: Units
    worker: Label


# ---------------------------------------------------------------------------------------------------- events


class Event(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Something that happened. ``data``: an object; see the table of events in the README."""

    event: int
    type: str
    at_ms: int
    data: dict[str, Any] = {}


class EventsPage(Reply, tag="events", frozen=True):
    """Events after the cursor. ``cursor``: where to go on. ``more``: there are more already. ``gap``: some between the
    old cursor and the first of these are not kept any more."""

    events: tuple[Event, ...] = ()
    cursor: int = 0
    more: bool = False
    gap: bool = False


class EventsRead(Request[EventsPage], tag="events.read", frozen=True):
    """A page of the events of a run and all below it, also after its end. ``types``: only these (none: all)."""

    permission: ClassVar[str] = ""
    reads: ClassVar[bool] = True
    run: Id
    after: Number = 0
    types: Annotated[tuple[Name, ...], Meta(max_length=100)] = ()
    limit: Annotated[int, Meta(ge=1, le=500)] = 200


class EventsWait(WaitingRequest[Ok], tag="events.wait", kw_only=True, frozen=True):
    """Waits until there is an event after the cursor; read it then."""

    permission: ClassVar[str] = ""
    run: Id
    after: Number = 0


# ---------------------------------------------------------------------------------------------------- status


class Holding(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One lease, in the run ``run``. ``until_ms`` is an estimate in Unix time: leases run on a clock of their own."""

    token: int
    kind: str
    name: str
    run: str | None
    since_ms: int
    until_ms: int | None = None


def shown_session(session: str) -> str:
    """What others see of a session's id, which lets in whoever knows it."""
    return hashlib.sha256(session.encode()).hexdigest()[:16]


class WorkerView(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One session: a process that uses the daemon. ``session``: see ``shown_session``."""

    session: str
    worker: str
    pid: int
    command: str
    connected: bool
    holdings: tuple[Holding, ...] = ()


class WaitView(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One call that waits: for what, since when, until when, and who holds it."""

    worker: str
    pid: int
    kind: str
    name: str
    run: str | None
    since_ms: int
    until_ms: int | None = None
    ahead: int = 0
    behind: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()  # of a worker: what its jobs lack, such as "slots browser"


class DaemonView(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """The daemon itself. ``trouble`` says why writes fail, while they do; ``inherited`` what limits it that the program
    which started it had, and that it could not give up."""

    version: str
    pid: int
    started_ms: int
    now_ms: int
    socket: str
    state_dir: str
    database_bytes: int
    wal_bytes: int
    sessions: int = 0
    trouble: str | None = None
    inherited: tuple[str, ...] = ()


class StatusView(Reply, tag="status", frozen=True):
    """What the daemon knows. Each list has at most ``limit`` entries; ``more`` names those that were cut."""

    daemon: DaemonView | None = None
    runs: tuple[RunView, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    waits: tuple[WaitView, ...] = ()
    queues: tuple[QueueView, ...] = ()
    more: tuple[str, ...] = ()
    names: dict[str, str] = {}  # of the limits, slots and budgets that somebody waits for, by id


class StatusGet(Request[StatusView], tag="status.get", frozen=True):
    """Looks at the daemon, its runs, workers, waits and queues."""

    permission: ClassVar[str] = "usage"
    reads: ClassVar[bool] = True
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 200


class HolderView(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """A worker label that holds something in a run. ``lease_expires_ms``: the first of its leases, an estimate."""

    worker: str
    holding: int
    lease_expires_ms: int | None = None
    names: tuple[str, ...] = ()  # of what it holds: once keys, keys of jobs, slots


class WaitingView(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Something that waits in a run."""

    kind: str
    name: str
    units: int = 1


class RunStatusView(Reply, tag="run.status", frozen=True):
    """A run, who holds something in it or below, and what waits there."""

    run: RunView
    workers: tuple[HolderView, ...] = ()
    waiting: tuple[WaitingView, ...] = ()


class RunsStatus(Request[RunStatusView], tag="runs.status", frozen=True):
    """How a run stands, also after its end."""

    permission: ClassVar[str] = "usage"
    reads: ClassVar[bool] = True
    run: Id


# ---------------------------------------------------------------------------------------------------- keys


class KeyCreated(Reply, tag="key.created", frozen=True):
    """A new key. ``secret`` is said only here."""

    id: str
    secret: str
    space: str
    permissions: tuple[str, ...]
    name: str = ""


class KeysCreate(Request[KeyCreated], tag="keys.create", kw_only=True, frozen=True):
    """Makes a key for a space. Like all verbs of keys, for the owner over the Unix socket only: FORBIDDEN otherwise."""

    permission: ClassVar[str] = ""
    space: Name = "default"
    permissions: Annotated[tuple[Permission, ...], Meta(max_length=16)]
    name: Label = ""


class KeyView(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """A key, without its secret."""

    id: str
    space: str
    permissions: tuple[str, ...]
    name: str = ""
    created_ms: int = 0
    revoked_ms: int | None = None


class KeyList(Reply, tag="keys", frozen=True):
    """Keys, oldest first."""

    keys: tuple[KeyView, ...] = ()


class KeysList(Request[KeyList], tag="keys.list", frozen=True):
    """All keys, also those that are revoked."""

    permission: ClassVar[str] = ""
    reads: ClassVar[bool] = True


class KeysRevoke(Request[KeyList], tag="keys.revoke", frozen=True):
    """Ends a key for good, its sessions and connections at once with it; the reply shows it."""

    permission: ClassVar[str] = ""
    key: Id


# ---------------------------------------------------------------------------------------------------- all of them

AnyRequest = (
    Hello
    | Bye
    | Ack
    | Cancel
    | Nested
    | Beat
    | Release
    | Renew
    | RunsJoin
    | RunsChild
    | RunsEnd
    | RunsGet
    | OnceAcquire
    | OnceGet
    | OnceComplete
    | OnceFail
    | QueuesDeclare
    | QueuesSend
    | QueuesSendMany
    | QueuesResult
    | QueuesAdmit
    | QueuesStarted
    | QueuesComplete
    | QueuesFail
    | LimitsDeclare
    | LimitsGet
    | LimitsTake
    | SlotsDeclare
    | SlotsGet
    | SlotsAcquire
    | BudgetsDeclare
    | BudgetsGet
    | BudgetsReserve
    | BudgetsSettle
    | BudgetsRelease
    | GroupsSubmit
    | GroupsEnded
    | TimersSleep
    | TimersAck
    | BarriersDeclare
    | BarriersGet
    | BarriersArrive
    | EventsRead
    | EventsWait
    | StatusGet
    | RunsStatus
    | KeysCreate
    | KeysList
    | KeysRevoke
)
AnyReply = (
    Ok
    | Error
    | Welcome
    | RunView
    | OnceGranted
    | OnceDone
    | OnceFailed
    | OnceHeld
    | OnceOpen
    | OnceFailCounted
    | QueueView
    | JobView
    | JobsSent
    | JobsGranted
    | Released
    | Renewed
    | LimitView
    | LimitTaken
    | LimitBusy
    | SlotsView
    | SlotsGranted
    | SlotsBusy
    | BudgetView
    | BudgetReserved
    | BudgetSettled
    | GroupView
    | GroupEnded
    | TimerView
    | BarrierView
    | EventsPage
    | StatusView
    | RunStatusView
    | KeyCreated
    | KeyList
)
AnyPush = Parked | LeaseLost | RunEnded | JobsReturn | Reconnect

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_reply = msgspec.msgpack.Decoder(AnyReply).decode
decode_push = msgspec.msgpack.Decoder(AnyPush).decode
