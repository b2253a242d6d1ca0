"""The collectives, as a user calls them.

Arrays are NumPy or CuPy arrays of any dtype without Python objects; all ranks of a call pass the
same kind.  They are divided and joined along axis 0, whose entries are called rows.  Without `out`
the result is a new array of the input's kind.  The input is not modified unless it is also `out`,
for a call in place.  Ranks of one host read each other's CuPy arrays directly where that works;
other messages of CuPy arrays are staged in page-locked host memory, or sent by MPI from the memory
of the GPU.  They are combined on the GPU.

Each combination of two float16 or bfloat16 values is computed in float32 and rounded once to the
array's dtype, so these dtypes are also sent and stored.  An average is divided in float32 and
rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, Unpack, overload

from collectives.arrays import Array, Operator
from collectives.communicator import arguments, exchange
from collectives.communicator.calls import Calls, SentReceived, collective
from collectives.communicator.options import Async, Blocking, Starts, Waits
from collectives.runtime import Work

A = TypeVar("A")  # an array; the result has the same kind
Op = str | Operator
Counts = Sequence[int] | None  # None: as evenly as possible
Table = Sequence[int] | Sequence[Sequence[int]] | SentReceived | None


class Collectives(Calls):
    """The collectives of a communicator."""

    # Between a root and the others

    @overload
    def broadcast(self, x: A | None = ..., root: int = ..., **how: Unpack[Blocking[A]]) -> A: ...
    @overload
    def broadcast(self, x: A | None = ..., root: int = ..., **how: Unpack[Async[A]]) -> Work[A]: ...
    @collective
    def broadcast(
        self,
        x: Array | None = None,
        root: int = 0,
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send the root's array to every rank.

        Without `out`, a header of 256 bytes with the shape and dtype is sent first.  An `x` that
        does not match it raises ValueError on its rank.  With `out` on every rank no header is
        sent.

        Parameters
        ----------
        x : array, optional
            On the root the array to send, of any shape and dtype.  On another rank either an array
            of the same shape and dtype, which is filled, or None, and then a new array is made.
        root : int
            The rank that sends.
        out : array, optional
            An array to be filled instead of `x`, on every rank or on none.

        Returns
        -------
        array or Work
            On every rank the array that holds the root's values: `out`, `x`, or a new one.

        Examples
        --------
            x = comm.broadcast(x if comm.rank == 0 else None)
        """
        return arguments.broadcast(self, x, root, out)

    @overload
    def scatter(
        self,
        x: A | None = ...,
        root: int = ...,
        *,
        counts: Counts = ...,
        **how: Unpack[Blocking[A]],
    ) -> A: ...
    @overload
    def scatter(
        self, x: A | None = ..., root: int = ..., *, counts: Counts = ..., **how: Unpack[Async[A]]
    ) -> Work[A]: ...
    @collective
    def scatter(
        self,
        x: Array | None = None,
        root: int = 0,
        *,
        out: Array | None = None,
        counts: Counts = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Divide the rows of the root's array among the ranks.

        Without `out`, a header with shape, dtype and counts is sent first.  With `out` on every
        rank no header is sent; then the parts must be equal, or every rank must pass `counts`.

        Parameters
        ----------
        x : array, optional
            On the root an array of shape (rows, ...); it is ignored on other ranks.
        root : int
            The rank that sends.
        out : array, optional
            The array for this rank's rows, on every rank or on none.
        counts : sequence of int, optional
            ``counts[r]`` rows go to rank r, in the order of the ranks.  None: as evenly as
            possible, larger parts first.

        Returns
        -------
        array or Work
            This rank's rows, an array of shape (counts[rank], ...).

        Examples
        --------
            mine = comm.scatter(x if comm.rank == 0 else None, counts=[10, 20, 30])
        """
        return arguments.scatter(self, x, root, out, counts)

    @overload
    def gather(
        self, x: A, root: int = ..., *, counts: Counts = ..., **how: Unpack[Blocking[A]]
    ) -> A | None: ...
    @overload
    def gather(
        self, x: A, root: int = ..., *, counts: Counts = ..., **how: Unpack[Async[A]]
    ) -> Work[A | None]: ...
    @collective
    def gather(
        self,
        x: Array,
        root: int = 0,
        *,
        out: Array | None = None,
        counts: Counts = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Join the rows of all ranks, in the order of the ranks, on the root.

        Parameters
        ----------
        x : array
            This rank's rows, of shape (rows, ...); the other dimensions and the dtype are the same
            on all ranks.  0-d arrays become the entries of a vector.
        root : int
            The rank that receives.
        out : array, optional
            The array for the result; it matters on the root only.
        counts : sequence of int, optional
            Rank r has ``counts[r]`` rows; the same list on every rank.  None: all ranks have
            equally many.

        Returns
        -------
        array, None or Work
            All rows on the root; None on the other ranks.

        Examples
        --------
            rows = comm.gather(x, root=0)              # None on the other ranks
        """
        return arguments.gather(self, x, root, out, counts)

    @overload
    def reduce(
        self, x: A, op: Op = ..., root: int = ..., **how: Unpack[Blocking[A]]
    ) -> A | None: ...
    @overload
    def reduce(
        self, x: A, op: Op = ..., root: int = ..., **how: Unpack[Async[A]]
    ) -> Work[A | None]: ...
    @collective
    def reduce(
        self,
        x: Array,
        op: Op = "sum",
        root: int = 0,
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Combine the arrays of all ranks element by element, on the root.

        Parameters
        ----------
        x : array
            An array of any shape, of the same shape and dtype on all ranks.
        op : str or Operator
            sum, prod, min, max, avg, and, or, xor, or a `collectives.Operator`; the same on all
            ranks.
        root : int
            The rank that receives.
        out : array, optional
            The array for the result; it matters on the root only.

        Returns
        -------
        array, None or Work
            The combination on the root; None on the other ranks.

        Examples
        --------
            total = comm.reduce(x, "max", root=0)      # None on the other ranks
        """
        return arguments.reduce(self, x, op, root, out)

    # Among all ranks

    @overload
    def all_reduce(
        self, x: A, op: Op = ..., *, shards: int | None = ..., **how: Unpack[Blocking[A]]
    ) -> A: ...
    @overload
    def all_reduce(
        self, x: A, op: Op = ..., *, shards: int | None = ..., **how: Unpack[Async[A]]
    ) -> Work[A]: ...
    @collective
    def all_reduce(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        shards: int | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Combine the arrays of all ranks element by element, on every rank.

        Parameters
        ----------
        x : array
            An array of any shape, of the same shape and dtype on all ranks.
        op : str or Operator
            sum, prod, min, max, avg, and, or, xor, or a `collectives.Operator`; the same on all
            ranks.
        out : array, optional
            The array for the result; it may be `x`.
        shards : int, optional
            The number of logical shards of all ranks together, for a result whose bits do not
            depend on the number of ranks.  `x` then has the shape (own, ...): the shards of this
            rank, one after the other.  The ranks have consecutive shards, as
            ``collectives.even_counts(shards, size)`` divides them, and at least one each.  None:
            each rank has one array.

        Returns
        -------
        array or Work
            The combination, of the shape and dtype of `x` (of one shard): the same values on every
            rank, to the last bit unless the algorithm's `is_bitwise` is False.

        Notes
        -----
        Floating-point sums depend on the order of their operands.  Algorithms with `is_invariant`
        combine along one tree, which is fixed by the number of contributions alone: its left side
        has the greatest power of two below that number.  The contributions are the arrays of the
        ranks, or the shards.  So a sum of 8 shards has the same bits on 1 to 8 ranks.  With
        `shards` the algorithm is `invariant` (the default) or `invariant_one_shot`, and `avg`
        divides by the number of shards.

        Examples
        --------
            total = comm.all_reduce(x)
            comm.all_reduce(x, "max", out=x)                              # in place
            work = comm.all_reduce(x, algorithm="ring", async_op=True)    # then work.wait()

        The sum of 8 shards, of which this rank has some:

            gradients = np.stack([gradient(part) for part in parts])
            total = comm.all_reduce(gradients, shards=8)
        """
        return arguments.reduction(self, "all_reduce", x, op, out, shards=shards)

    @overload
    def reduce_scatter(
        self,
        x: A,
        op: Op = ...,
        *,
        counts: Counts = ...,
        shards: int | None = ...,
        **how: Unpack[Blocking[A]],
    ) -> A: ...
    @overload
    def reduce_scatter(
        self,
        x: A,
        op: Op = ...,
        *,
        counts: Counts = ...,
        shards: int | None = ...,
        **how: Unpack[Async[A]],
    ) -> Work[A]: ...
    @collective
    def reduce_scatter(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        counts: Counts = None,
        shards: int | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Combine the arrays of all ranks element by element, and divide the rows of the result.

        Parameters
        ----------
        x : array
            An array of shape (rows, ...), of the same shape and dtype on all ranks.
        op : str or Operator
            sum, prod, min, max, avg, and, or, xor, or a `collectives.Operator`; the same on all
            ranks.
        out : array, optional
            The array for this rank's rows.
        counts : sequence of int, optional
            ``counts[r]`` rows go to rank r; the same list on every rank.  None: as evenly as
            possible, larger parts first.
        shards : int, optional
            The number of logical shards of all ranks together, as in `all_reduce`; `x` then has the
            shape (own, rows, ...).

        Returns
        -------
        array or Work
            This rank's rows of the combination, an array of shape (counts[rank], ...).

        Examples
        --------
            mine = comm.reduce_scatter(x, "sum", counts=[10, 20, 30])
        """
        return arguments.reduce_scatter(self, x, op, out, counts, shards)

    @overload
    def all_gather(self, x: A, *, counts: Counts = ..., **how: Unpack[Blocking[A]]) -> A: ...
    @overload
    def all_gather(self, x: A, *, counts: Counts = ..., **how: Unpack[Async[A]]) -> Work[A]: ...
    @collective
    def all_gather(
        self,
        x: Array,
        *,
        out: Array | None = None,
        counts: Counts = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Join the rows of all ranks, in the order of the ranks, on every rank.

        Parameters
        ----------
        x : array
            This rank's rows, of shape (rows, ...); the other dimensions and the dtype are the same
            on all ranks.  0-d arrays become the entries of a vector.
        out : array, optional
            The array for the result; `x` may be this rank's place in it.
        counts : sequence of int, optional
            Rank r has ``counts[r]`` rows; the same list on every rank.  None: all ranks have
            equally many.

        Returns
        -------
        array or Work
            All rows, an array of shape (sum of counts, ...).

        Examples
        --------
            rows = comm.all_gather(x, counts=[10, 20, 30])
        """
        return arguments.all_gather(self, x, out, counts)

    @overload
    def all_to_all(self, x: A, *, counts: Table = ..., **how: Unpack[Blocking[A]]) -> A: ...
    @overload
    def all_to_all(self, x: A, *, counts: Table = ..., **how: Unpack[Async[A]]) -> Work[A]: ...
    @collective
    def all_to_all(
        self,
        x: Array,
        *,
        out: Array | None = None,
        counts: Table = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send rows from every rank to every rank.

        Parameters
        ----------
        x : array
            An array of shape (rows, ...): first the rows for rank 0, then those for rank 1, and so
            on.
        out : array, optional
            The array for the result.
        counts : optional
            One of four.  None: all ranks bring equally many rows and divide them as evenly as
            possible.  p integers: the rows from here to each rank; the ranks then exchange their
            counts first, and an `out` of a wrong number of rows is refused only after that.  A p x
            p table, the same on every rank: ``counts[s][d]`` rows from rank s to rank d; nothing is
            exchanged.  `collectives.SentReceived`: the counts of this rank only; nothing is
            exchanged either, except in checked mode, which compares them.  The default algorithm is
            then linear.

        Returns
        -------
        array or Work
            The rows that were sent to this rank, in the order of the ranks that they come from.

        Notes
        -----
        A rank needs to know only the counts of blocks that it sends or receives.  By linear,
        linear_sync, pairwise or one_factor these are its own.  By bruck, torus and the others,
        blocks of other ranks pass through it.  If such an algorithm is named, and a rank gives only
        its own counts, the count of every block is first sent the way that the block will take: 8
        bytes for each block (or piece of a block), in as many messages as the call itself has,
        under "counts" in the ledger (Fan, Domke, Ba and Kumar 2024, arXiv 2411.02581).

        Examples
        --------
            y = comm.all_to_all(x, counts=[2, 0, 5])    # 2 rows to rank 0, 5 to rank 2
        """
        return exchange.all_to_all(self, x, out, counts, algorithm)

    @overload
    def scan(self, x: A, op: Op = ..., **how: Unpack[Blocking[A]]) -> A: ...
    @overload
    def scan(self, x: A, op: Op = ..., **how: Unpack[Async[A]]) -> Work[A]: ...
    @collective
    def scan(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Combine, on each rank, the arrays of all ranks up to and including this one.

        Parameters
        ----------
        x : array
            An array of any shape, of the same shape and dtype on all ranks.
        op : str or Operator
            sum, prod, min, max, and, or, xor, or a `collectives.Operator`; not avg.
        out : array, optional
            The array for the result; it may be `x`.

        Returns
        -------
        array or Work
            The combination of the arrays of ranks 0 to `rank`, always in the order of the ranks.

        Examples
        --------
            so_far = comm.scan(x, "sum")
        """
        return arguments.reduction(self, "scan", x, op, out)

    @overload
    def exscan(self, x: A, op: Op = ..., **how: Unpack[Blocking[A]]) -> A | None: ...
    @overload
    def exscan(self, x: A, op: Op = ..., **how: Unpack[Async[A]]) -> Work[A | None]: ...
    @collective
    def exscan(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Combine, on each rank, the arrays of all ranks before this one.

        Parameters
        ----------
        x : array
            An array of any shape, of the same shape and dtype on all ranks.
        op : str or Operator
            sum, prod, min, max, and, or, xor, or a `collectives.Operator`; not avg.
        out : array, optional
            The array for the result; it may be `x`.  On rank 0 it is checked and not written.

        Returns
        -------
        array, None or Work
            The combination of the arrays of ranks 0 to `rank` - 1, in the order of the ranks; None
            on rank 0.

        Examples
        --------
            before = comm.exscan(x, "sum")             # None on rank 0
        """
        return arguments.exscan(self, x, op, out)

    @overload
    def barrier(self, *, algorithm: str | None = ..., **how: Unpack[Waits]) -> None: ...
    @overload
    def barrier(self, *, algorithm: str | None = ..., **how: Unpack[Starts]) -> Work[None]: ...
    def barrier(
        self, *, algorithm: str | None = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Return when every rank has called it.

        Parameters
        ----------
        algorithm : str, optional
            "dissemination" or "tree".  None: the first.
        async_op : bool
            Whether to return a `Work` at once, for whose `wait()` the caller waits later.
        timeout : float, optional
            The time limit in seconds.  None: the communicator's `timeout`.

        Returns
        -------
        None or Work

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, before any message is sent.
        CollectiveTimeout
            After `timeout` seconds.  The message names the ranks that the call waits for.

        Examples
        --------
            comm.barrier(timeout=60)
        """
        return self._barrier(algorithm=algorithm, async_op=async_op, timeout=timeout)

    @collective
    def _barrier(self, x: None = None, *, out: None = None, **_: Any) -> Any:
        """Make a barrier, with the arguments that all collectives have."""
        return arguments.barrier(self)
