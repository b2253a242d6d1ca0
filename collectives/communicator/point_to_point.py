"""The point-to-point calls, as a user makes them."""

from __future__ import annotations

from typing import Any, Literal, Required, TypedDict, TypeVar, Unpack, overload

from collectives.arrays import Array, Arrays, validation
from collectives.communicator.making import Maker, Options, checked_options
from collectives.communicator.prepare import Caller
from collectives.runtime import Work

A = TypeVar("A")  # an array; the result has the same kind


class Blocking(TypedDict, total=False):
    """Options of a call that returns its result."""

    async_op: Literal[False]
    timeout: float | None


class Asynchronous(TypedDict, total=False):
    """Options of a call that returns a `Work`."""

    async_op: Required[Literal[True]]
    timeout: float | None


class PointToPoint:
    """The point-to-point calls of a communicator.

    An invalid argument raises TypeError or ValueError before anything is sent.
    """

    _maker: Maker
    _caller: Caller

    @overload
    def send(self, x: Array, peer: int, tag: int = ..., **how: Unpack[Blocking]) -> None: ...
    @overload
    def send(
        self, x: Array, peer: int, tag: int = ..., **how: Unpack[Asynchronous]
    ) -> Work[None]: ...
    def send(
        self,
        x: Array,
        peer: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send an array to another rank, which must receive it.

            comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)

        - `x`: the array to send.
        - `peer`: the rank that receives it; this one only with `async_op`.
        - `tag`: a number of at least 0; the receiver passes the same.  Messages between two ranks
          with the same tag arrive in order.
        - `async_op`: if True, return a `Work` at once; `x` must not change before its `wait()`.
        - `timeout`: seconds.  None: the communicator's `timeout`.

        Returns None when `x` may be changed again; on a GPU, in the order of the current stream.
        Raises `CollectiveTimeout`, which names the rank that it waits for, after `timeout` seconds,
        and TypeError or ValueError, before anything is sent, for an invalid argument.
        """
        options = checked_options(self._maker, "send", None, async_op, timeout)
        arrays = Arrays(*self._caller.readable(x), None)
        return self._message(options, arrays, tag, self._peer(peer, options), None)

    @overload
    def recv(self, x: A, peer: int, tag: int = ..., **how: Unpack[Blocking]) -> A: ...
    @overload
    def recv(self, x: A, peer: int, tag: int = ..., **how: Unpack[Asynchronous]) -> Work[A]: ...
    def recv(
        self,
        x: Array,
        peer: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Fill an array with a message of another rank.

            work = comm.recv(x, 0, async_op=True)
            ...
            x = work.wait()

        - `x`: a C-contiguous array of the size of the message.
        - `peer`: the rank that sends it; this one only with `async_op`.
        - `tag`: the tag that the sender passes.
        - `async_op`: if True, return a `Work` at once; `x` is filled after its `wait()`.
        - `timeout`: seconds.  None: the communicator's `timeout`.

        Returns `x`; on a GPU it is filled in the order of the current stream.  Raises
        `CollectiveMismatch` if the message has another length, `CollectiveTimeout`, which names the
        rank that it waits for, after `timeout` seconds, and TypeError or ValueError, before
        anything is posted, for an invalid argument.
        """
        options = checked_options(self._maker, "recv", None, async_op, timeout)
        backend, target = validation.writable(x, "x")
        source = self._peer(peer, options)
        return self._message(options, Arrays(backend, None, target), tag, None, source)

    def probe(self, tag: int = 0) -> int | None:
        """Return a rank whose message with this tag has arrived, without waiting for one.

            while (source := comm.probe()) is None:
                ...
            comm.recv(x, source)

        - `tag`: the tag that the sender passes.

        Returns a rank from which `recv` would receive now, or None if no message has arrived that
        is not received yet.  Raises TypeError or ValueError for an invalid tag.
        """
        session = self._caller.session
        session.check()
        return session.transport.probe(session.numbering.user_tag(tag))

    @overload
    def send_recv(
        self,
        x: A,
        dest: int,
        source: int,
        tag: int = ...,
        *,
        out: A | None = ...,
        **how: Unpack[Blocking],
    ) -> A: ...
    @overload
    def send_recv(
        self,
        x: A,
        dest: int,
        source: int,
        tag: int = ...,
        *,
        out: A | None = ...,
        **how: Unpack[Asynchronous],
    ) -> Work[A]: ...
    def send_recv(
        self,
        x: Array,
        dest: int,
        source: int,
        tag: int = 0,
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send to one rank while receiving from another; a ring of these calls cannot deadlock.

            y = comm.send_recv(x, dest=(rank + 1) % size, source=(rank - 1) % size)

        - `x`: the array to send.
        - `dest`, `source`: the ranks to send to and to receive from; both may be this one.
        - `tag`: a number from 0 on, the same at both ends.
        - `out`: where to receive; it may not share memory with `x`.  None: a new array like `x`.
        - `async_op`: if True, return a `Work` at once; its `wait()` returns the result.
        - `timeout`: seconds.  None: the communicator's `timeout`.

        Returns the array with the received data.  Raises the errors of `send` and `recv`.
        """
        options = checked_options(self._maker, "send_recv", None, async_op, timeout)
        backend, array = self._caller.readable(x)
        target = validation.result(out, backend, tuple(array.shape), array.dtype)
        if out is not None and validation.aliasing(backend, array, target) != "none":
            raise ValueError("out shares memory with x, which is sent while out is filled")
        to = validation.rank(dest, self._caller.size, "dest")
        origin = validation.rank(source, self._caller.size, "source")
        return self._message(options, Arrays(backend, array, target), tag, to, origin)

    def _message(
        self, options: Options, arrays: Arrays, tag: int, dest: int | None, source: int | None
    ) -> Any:
        tag = self._caller.session.numbering.user_tag(tag)
        return self._maker.make_message(options, arrays, tag, dest, source)

    def _peer(self, peer: object, options: Options) -> int:
        number = validation.rank(peer, self._caller.size, "peer")
        if number == self._caller.rank and not options.async_op:
            raise ValueError(
                f"rank {number} would wait for itself; async_op=True or send_recv can serve that"
            )
        return number
