"""What is said of a message that MPI has not delivered."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from collectives import CollectiveError, CollectiveMismatch
from collectives.engines.mpi_errors import Failed, translate_message_error

pytestmark = pytest.mark.mpi


def translated(*messages: Failed) -> BaseException:
    return translate_message_error(MPI.Exception(MPI.ERR_IN_STATUS), 0, messages)


def test_a_message_that_failed_is_not_said_to_be_too_long() -> None:
    """MPICH's error if a rank dies while another one reads from its memory."""
    error = translated(Failed(1, True, MPI.SUCCESS), Failed(2, True, MPI.ERR_OTHER))
    assert type(error) is CollectiveError
    assert "the message from rank 2 to rank 0 failed; rank 2 may have died" in str(error)
    assert isinstance(error.__cause__, MPI.Exception)
    error = translated(Failed(1, True, MPI.ERR_TRUNCATE), Failed(3, False, MPI.ERR_OTHER))
    assert "the message from rank 0 to rank 3 failed; rank 3 may have died" in str(error)


def test_a_message_that_is_too_long_is_a_mismatch() -> None:
    error = translated(Failed(1, True, MPI.ERR_PENDING), Failed(2, True, MPI.ERR_TRUNCATE))
    assert type(error) is CollectiveMismatch
    assert "rank 2 sent rank 0 a longer message than it expected" in str(error)
