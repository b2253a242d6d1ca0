"""What a table of traffic says that it does not show."""

from __future__ import annotations

ALWAYS = (
    "Not seen: mpi4py's messages between two ranks, windows, files and neighbourhood collectives;",
    "collectives that MPI itself makes, as on an intercommunicator or on MPI.Cartcomm(comm);",
    "and what other libraries send by themselves.",
)

_sentences: dict[str, None] = {}  # in the order in which they were added


def add_unseen(sentence: str) -> None:
    """Note something that this process sends and that no ledger sees."""
    _sentences[sentence] = None


def unseen() -> list[str]:
    """Return the sentences that were noted, each once."""
    return list(_sentences)
