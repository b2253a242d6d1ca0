"""The point-to-point calls, as a user makes them."""

from __future__ import annotations

from typing import Any, TypeVar, Unpack, overload

from collectives.arrays import Array, Arrays, validation
from collectives.communicator.calls import Calls
from collectives.communicator.options import Starts, Waits
from collectives.runtime import Ends, Steps, Work

A = TypeVar("A")  # an array; the result has the same kind


class PointToPoint(Calls):
    """The point-to-point calls of a communicator."""

    @overload
    def send(self, x: Array, peer: int, tag: int = ..., **how: Unpack[Waits]) -> None: ...
    @overload
    def send(self, x: Array, peer: int, tag: int = ..., **how: Unpack[Starts]) -> Work[None]: ...
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

        Parameters
        ----------
        x : array
            The array to send.
        peer : int
            The rank that receives it; this one only with `async_op`.
        tag : int
            A number of at least 0; the receiver passes the same.  Messages between two ranks with
            the same tag arrive in order.
        async_op : bool
            Whether to return a `Work` at once; `x` must not change before its `wait()`.
        timeout : float, optional
            The time limit in seconds.  None: the communicator's `timeout`.

        Returns
        -------
        None or Work
            None when `x` may be changed again; on a GPU, in the order of the current stream.

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, before anything is sent.
        CollectiveTimeout
            After `timeout` seconds.  The message names the rank that the call waits for.

        Examples
        --------
            comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        """
        self._refuse_options_of_calls(async_op, timeout)
        arrays = Arrays(*self._readable(x), None)
        dest = self._peer(peer, async_op)
        return self._message("send", arrays, tag, dest, None, async_op, timeout)

    @overload
    def recv(self, x: A, peer: int, tag: int = ..., **how: Unpack[Waits]) -> A: ...
    @overload
    def recv(self, x: A, peer: int, tag: int = ..., **how: Unpack[Starts]) -> Work[A]: ...
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

        Parameters
        ----------
        x : array
            A C-contiguous array of the size of the message.
        peer : int
            The rank that sends it; this one only with `async_op`.
        tag : int
            The tag that the sender passes.
        async_op : bool
            Whether to return a `Work` at once; `x` is filled after its `wait()`.
        timeout : float, optional
            The time limit in seconds.  None: the communicator's `timeout`.

        Returns
        -------
        array or Work
            `x`; on a GPU it is filled in the order of the current stream.

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, before anything is posted.
        CollectiveMismatch
            If the message has another length.
        CollectiveTimeout
            After `timeout` seconds.  The message names the rank that the call waits for.

        Examples
        --------
            work = comm.recv(x, 0, async_op=True)
            ...
            x = work.wait()
        """
        self._refuse_options_of_calls(async_op, timeout)
        backend, target = validation.writable(x, "x")
        source, arrays = self._peer(peer, async_op), Arrays(backend, None, target)
        return self._message("recv", arrays, tag, None, source, async_op, timeout)

    def probe(self, tag: int = 0) -> int | None:
        """Return a rank whose message with this tag has arrived, without waiting for one.

        Parameters
        ----------
        tag : int
            The tag that the sender passes.

        Returns
        -------
        int or None
            A rank from which `recv` would receive now; None if no message has arrived that is not
            received yet.

        Raises
        ------
        TypeError, ValueError
            For an invalid tag.

        Examples
        --------
            while (source := comm.probe()) is None:
                ...
            comm.recv(x, source)
        """
        session = self._session
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
        **how: Unpack[Waits],
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
        **how: Unpack[Starts],
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

        Parameters
        ----------
        x : array
            The array to send.
        dest, source : int
            The ranks to send to and to receive from; both may be this one.
        tag : int
            A number of at least 0, the same at both ends.
        out : array, optional
            Where to receive; it may not share memory with `x`.  None: a new array like `x`.
        async_op : bool
            Whether to return a `Work` at once, whose `wait()` returns the result.
        timeout : float, optional
            The time limit in seconds.  None: the communicator's `timeout`.

        Returns
        -------
        array or Work
            The array with the received data.

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, before anything is sent.
        CollectiveMismatch
            If the message has another length.
        CollectiveTimeout
            After `timeout` seconds.  The message names the rank that the call waits for.

        Examples
        --------
            y = comm.send_recv(x, dest=(rank + 1) % size, source=(rank - 1) % size)
        """
        self._refuse_options_of_calls(async_op, timeout)
        backend, array = self._readable(x)
        target = validation.result(out, backend, tuple(array.shape), array.dtype)
        if out is not None and validation.aliasing(backend, array, target) != "none":
            raise ValueError("out shares memory with x, which is sent while out is filled")
        to = validation.rank(dest, self.size, "dest")
        origin = validation.rank(source, self.size, "source")
        arrays = Arrays(backend, array, target)
        return self._message("send_recv", arrays, tag, to, origin, async_op, timeout)

    def _message(
        self,
        name: str,
        arrays: Arrays,
        tag: int,
        dest: int | None,
        source: int | None,
        async_op: bool,
        timeout: float | None,
    ) -> Any:
        """Make a send, a receive, or both at once, or a plan of it."""
        session, limit = self._session, validation.seconds(timeout)
        number = session.numbering.user_tag(tag)
        ends, messages = Ends.of(name, arrays, dest, source), session.messages
        if self.is_planning:
            session.check()
            return messages.plan(ends, arrays, number)

        def steps(_: Work[Any]) -> Steps:
            yield messages.take(ends, arrays, number)
            return arrays.target

        return session.message(steps, limit, bool(async_op))

    def _peer(self, peer: object, async_op: object) -> int:
        number = validation.rank(peer, self.size, "peer")
        if number == self.rank and not async_op:
            raise ValueError(
                f"rank {number} would wait for itself; async_op=True or send_recv can serve that"
            )
        return number
