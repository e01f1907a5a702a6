"""The fields that many bodies have, with their ranges."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from runstate import wire
from runstated.http.errors import ApiError
from runstated.http.names import from_id

Holder = Annotated[str, Meta(max_length=512)]
LeaseSeconds = Annotated[int, Meta(ge=5, le=600)]
TtlSeconds = Annotated[int, Meta(ge=5, le=3_600)]
WaitMs = Annotated[int, Meta(ge=0, le=25_000)]
WaitSeconds = Annotated[int, Meta(ge=0, le=25)]
Digits = Annotated[str, Meta(pattern="^[0-9]{1,15}$")]
TokenText = Annotated[str, Meta(min_length=1, max_length=64)]
Moment = Annotated[datetime, Meta(tz=True)]
ErrorText = Annotated[str, Meta(max_length=4_000)]


def null() -> msgspec.Raw:
    """An absent payload is null."""
    return msgspec.Raw(b"null")


class UnitsWanted(msgspec.Struct, rename="camel", frozen=True):
    """Units of slots or of a limit, by its name."""

    name: wire.Name
    units: wire.Units = 1


class MoneyWanted(msgspec.Struct, rename="camel", frozen=True):
    """An amount of a budget; nothing is reserved for zero."""

    name: wire.Name
    reserve_minor: Digits


class Requirements(msgspec.Struct, rename="camel", frozen=True):
    """What a job needs."""

    pools: Annotated[tuple[UnitsWanted, ...], Meta(max_length=4)] = ()
    quotas: Annotated[tuple[UnitsWanted, ...], Meta(max_length=4)] = ()
    budgets: Annotated[tuple[MoneyWanted, ...], Meta(max_length=2)] = ()

    def needs(self) -> wire.Needs:
        return wire.Needs(
            slots=tuple(wire.UnitsNeeded(name=one.name, units=one.units) for one in self.pools),
            limits=tuple(wire.UnitsNeeded(name=one.name, units=one.units) for one in self.quotas),
            budgets=tuple(
                wire.MoneyNeeded(name=one.name, reserve_minor=int(one.reserve_minor))
                for one in self.budgets
                if int(one.reserve_minor)
            ),
        )


def needs(requirements: Requirements | None) -> wire.Needs | None:
    return None if requirements is None else requirements.needs()


def name_in(text: str) -> str:
    """A name in a path. Raises ApiError when it is empty or too long."""
    if not 1 <= len(text) <= 256:
        raise ApiError("VALIDATION_FAILED", "a name has 1 to 256 characters")
    return text


def queue_of(mailbox_id: str) -> str:
    return from_id("q", "mailbox", mailbox_id)[0]


def checked_id(text: str, word: str) -> str:
    """An id of the daemon's own in a path or body. Raises ApiError for what cannot be one."""
    if not 1 <= len(text) <= 64:
        raise ApiError("NOT_FOUND", f"{word} {text[:100]} not found")
    return text
