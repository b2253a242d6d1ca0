"""No argument, however odd, reaches a message or breaks a communicator: drawn at random."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

import collectives
from collectives import Communicator
from collectives.arrays import validation
from collectives.arrays.backends import HOST
from collectives.engines.threads import ThreadTransport
from tests.scenarios import arguments

SIZE = 3
QUICK = {"deadline": None, "derandomize": True, "database": None}


def on_threads(body: Any) -> None:
    collectives.run(body, SIZE, timeout=20)


@settings(max_examples=500, **QUICK)
@given(arguments.cases())
@pytest.mark.slow
def test_a_call_is_served_or_refused_by_all_ranks(case: arguments.Case) -> None:
    arguments.check(case, SIZE, on_threads)


@settings(max_examples=80, **QUICK)
@given(arguments.bad_cases(SIZE))
def test_every_rank_refuses_its_own_arguments(cases: tuple[arguments.Case, ...]) -> None:
    arguments.check_each(cases, on_threads)


def test_a_check_that_lets_something_through_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = arguments.Case("all_reduce", False, {"x": arguments.value("np.ones(6)")}, "frozen")
    arguments.check(case, SIZE, on_threads)
    monkeypatch.setattr(validation, "writable", lambda out, what: (HOST, out))
    with pytest.raises(ValueError, match="read-only"):
        arguments.check(case, SIZE, on_threads)


def test_a_refusal_after_a_message_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = arguments.Case("barrier", False, {"timeout": arguments.value("-1")}, None)
    arguments.check(case, SIZE, on_threads)
    right = Communicator.barrier

    def late(comm: Communicator, **named: Any) -> Any:
        if isinstance(comm._session.transport, ThreadTransport) and named:
            right(comm)
        return right(comm, **named)

    monkeypatch.setattr(Communicator, "barrier", late)
    with pytest.raises(AssertionError):
        arguments.check(case, SIZE, on_threads)


def test_an_error_of_another_kind_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = arguments.Case("barrier", False, {"timeout": arguments.value("[]")}, None)
    monkeypatch.setattr(validation, "seconds", lambda timeout: timeout[0])
    with pytest.raises(IndexError):
        arguments.check(case, SIZE, on_threads)


def test_ranks_that_disagree_would_be_noticed() -> None:
    case = arguments.Case(
        "all_reduce", False, {"x": arguments.value("np.ones(3) if r else 'no'")}, None
    )
    with pytest.raises(AssertionError, match="only some ranks refuse"):
        arguments.check(case, SIZE, on_threads)
