"""The loop that runs programs on host memory over MPI, compiled by numba.

It posts, polls, copies and combines without the interpreter and without its lock.  It returns to
Python when the program is complete, at the time limit, for an operator written in Python, or after
an error.  It calls the functions of the loaded MPI library, and the kernels, by address.

All its data is in blocks of 64-bit words, whose indices have names below; `compiled.py` fills them.
All arguments of MPI's functions are passed as 64 bits.  A callee reads as many bits as it declares,
so one loop serves handles that are integers (MPICH) and pointers (Open MPI).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from collectives.diagnostics import flight_recorder
from collectives.engines import host_memory
from collectives.programs import Kind, Row

# Words of a port, one for each communicator.
(
    IRECV,
    ISEND,
    TESTALL,
    GET_COUNT,
    CLOCK,
    YIELD,
    COMM,
    BYTE,
    REQUEST_BYTES,
    STATUS_BYTES,
    SPINS,
    NUM_PORT_WORDS,
) = range(12)

# Words of a state, one for each execution.  First the program and its arrays:
(
    PORT,
    ROWS,
    NUM_ROWS,
    ROW,
    REQUESTS,
    STATUSES,
    EXPECTED,
    TAG,
    INPUT_AT,
    OUTPUT_AT,
    SCRATCH_AT,
    COMBINE,
    DIVIDE,
    DIVISOR,
    ITEMSIZE,
    INTERRUPT,
) = range(16)
# the error, and room for the results of MPI and the clock:
ERROR, WHERE, GOT, FLAG, TIME = range(16, 21)  # TIME has two words
# the counter and the log of the runs:
ENTRY, NUMBER, KEY, LOG, COUNTER, FIRST_TAG, NUM_TAGS = range(22, 29)
# and the arrays that fit (see `fits`): their forms, and the output's offset from the input.
INPUT_FORM, OUTPUT_FORM, SHIFT = 29, 41, 53
# And where the numbers of runs are shown to other ranks, each at its remainder; 0: nowhere.
HOST_CALLS, NUM_STATE_WORDS = 54, 55

# Words of the form of an array: whether it exists, its dtype's address, its shape.
EXISTS, DTYPE, NUM_BYTES, NDIM, SHAPE = range(5)
MAX_DIMENSIONS = 8
assert OUTPUT_FORM - INPUT_FORM == SHIFT - OUTPUT_FORM == SHAPE + MAX_DIMENSIONS

DONE, WAITING, PYTHON, MPI_ERROR, WRONG_LENGTH, MISFIT = range(6)  # answers of the loop
APART = -(2**62)  # the SHIFT of an output that shares no memory with the input

# Fields of a NumPy array object, in bytes from its address (the C struct PyArrayObject_fields).
DATA_FIELD, NDIM_FIELD, DIMENSIONS_FIELD, DTYPE_FIELD, FLAGS_FIELD = 16, 24, 32, 56, 64
CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400

_I64, _I32 = ir.IntType(64), ir.IntType(32)

# Compiled code is cached until this file changes, so constants of other files are repeated here.
_RECEIVE, _SEND, _WAIT, _COPY, _COMBINE, _DIVIDE = range(6)
(
    KIND,
    ROUND,
    PEER,
    BUFFER,
    OFFSET,
    SIZE,
    SLOT,
    LEFT,
    LEFT_OFFSET,
    RIGHT,
    RIGHT_OFFSET,
    _ROW_BYTES,
) = range(0, 96, 8)
_NUM_ENTRIES, _ENTRY_BYTES, _UNDER_WAY, _COMPLETE = 256, 32, 1, 2
_NUM_HOST_CALLS = 64
assert [*Kind] == [_RECEIVE, _SEND, _WAIT, _COPY, _COMBINE, _DIVIDE]
assert [globals()[name.upper()] for name in Row._fields] == [*range(0, _ROW_BYTES, 8)]
assert (flight_recorder.NUM_CALLS, 8 * flight_recorder.WORDS) == (_NUM_ENTRIES, _ENTRY_BYTES)
assert host_memory.NUM_HOST_CALLS == _NUM_HOST_CALLS
assert (flight_recorder.UNDER_WAY, flight_recorder.COMPLETE) == (_UNDER_WAY, _COMPLETE)

_YIELDS_PER_CLOCK = 8  # times that a waiting rank yields before it reads the clock


@intrinsic
def load(_: Any, address: Any) -> Any:
    """Return the 64-bit word at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()))

    return types.int64(types.int64), generate


@intrinsic
def load32(_: Any, address: Any) -> Any:
    """Return the 32-bit word at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(builder.inttoptr(args[0], _I32.as_pointer()))
        return builder.sext(word, _I64)

    return types.int64(types.int64), generate


@intrinsic
def store(_: Any, address: Any, value: Any) -> Any:
    """Write a 64-bit word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def peek(_: Any, address: Any) -> Any:
    """Return a word that another thread may write at any time."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(pointer, "monotonic", 8)

    return types.int64(types.int64), generate


@intrinsic
def move(_: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy bytes between places that may overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, _I64, ir.IntType(1)])
        memmove = builder.module.declare_intrinsic("llvm.memmove", [pointer, pointer, _I64], kind)
        places = [builder.inttoptr(address, pointer) for address in args[:2]]
        builder.call(memmove, [*places, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def caller(num_arguments: int, answer: Any) -> Any:
    """Return a function that calls an address with 64-bit arguments.

    The called function returns 32 bits or nothing, as `answer` says.
    """

    @intrinsic
    def call(_: Any, function: Any, arguments: Any) -> Any:
        kinds = types.UniTuple(types.int64, num_arguments)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(answer, [_I64] * num_arguments)
            values = [builder.extract_value(args[1], n) for n in range(num_arguments)]
            result = builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
            return builder.sext(result, _I64) if answer == _I32 else ir.Constant(_I64, 0)

        return types.int64(types.int64, kinds), generate

    return call


call0 = caller(0, _I32)
call2 = caller(2, _I32)
call3 = caller(3, _I32)
call4 = caller(4, _I32)
call7 = caller(7, _I32)
divide_by = caller(3, ir.VoidType())
combine_with = caller(4, ir.VoidType())


@njit(nogil=True, error_model="numpy")
def now(port: int, state: int) -> int:
    """Return the nanoseconds of the clock that is `time.monotonic` in Python."""
    at = state + 8 * TIME
    call2(load(port + 8 * CLOCK), (1, at))
    return load(at) * 1_000_000_000 + load(at + 8)


@njit(nogil=True, error_model="numpy")
def fail(state: int, where: int, error: int, got: int, answer: int) -> int:
    """Store an error and the slot of its message; return `answer`."""
    store(state + 8 * WHERE, where)
    store(state + 8 * ERROR, error)
    store(state + 8 * GOT, got)
    return answer


@njit(nogil=True, error_model="numpy")
def post(state: int, port: int, row: int) -> int:
    """Post the receive or send of a row; return MPI's error code."""
    buffer, count, slot = load(row + BUFFER), load(row + SIZE), load(row + SLOT)
    place = load(state + 8 * (INPUT_AT + buffer)) + load(row + OFFSET)
    request = load(state + 8 * REQUESTS) + slot * load(port + 8 * REQUEST_BYTES)
    store(load(state + 8 * EXPECTED) + 8 * slot, count)
    kind = load(row)
    return call7(
        load(port + 8 * (IRECV + kind)),
        (
            place,
            count,
            load(port + 8 * BYTE),
            load(row + PEER),
            load(state + 8 * TAG),
            load(port + 8 * COMM),
            request,
        ),
    )


@njit(nogil=True, error_model="numpy")
def pause(state: int, port: int, nanoseconds: int, tries: int, started: int) -> int:
    """Let time pass between two polls; return -1 if a wait of some `nanoseconds` is over.

    Otherwise return when it has started, by the clock; 0 if the clock was not read yet.
    """
    if nanoseconds == 0 or peek(state + 8 * INTERRUPT) != 0:
        return -1
    if tries < load(port + 8 * SPINS):
        return started
    call0(load(port + 8 * YIELD), ())
    if tries % _YIELDS_PER_CLOCK != 0:
        return started
    time = now(port, state)
    if started == 0:
        return time
    return -1 if time - started > nanoseconds else started


@njit(nogil=True, error_model="numpy")
def wait(state: int, port: int, row: int, nanoseconds: int) -> int:
    """Wait for the messages of a row, for at most `nanoseconds`, and check their lengths."""
    slot, count, num_receives = load(row + SLOT), load(row + SIZE), load(row + PEER)
    requests = load(state + 8 * REQUESTS) + slot * load(port + 8 * REQUEST_BYTES)
    statuses, flag = load(state + 8 * STATUSES), state + 8 * FLAG
    started, tries = 0, 0
    while True:
        error = call4(load(port + 8 * TESTALL), (count, requests, flag, statuses))
        if error != 0:
            return fail(state, slot, error, 0, MPI_ERROR)
        if load32(flag) != 0:
            break
        tries += 1
        started = pause(state, port, nanoseconds, tries, started)
        if started < 0:
            return WAITING
    for i in range(num_receives):
        status = statuses + i * load(port + 8 * STATUS_BYTES)
        call3(load(port + 8 * GET_COUNT), (status, load(port + 8 * BYTE), flag))
        got = load32(flag)
        if got != load(load(state + 8 * EXPECTED) + 8 * (slot + i)):
            return fail(state, slot + i, 0, got, WRONG_LENGTH)
    return DONE


@njit(nogil=True, error_model="numpy")
def work(state: int, row: int) -> int:
    """Copy, combine or divide, as a row says; return PYTHON if there is no kernel for it."""
    kind, count = load(row), load(row + SIZE)
    target = load(state + 8 * (INPUT_AT + load(row + BUFFER))) + load(row + OFFSET)
    left = load(state + 8 * (INPUT_AT + load(row + LEFT))) + load(row + LEFT_OFFSET)
    if kind == _COPY:
        move(target, left, count)
        return DONE
    kernel = load(state + 8 * (COMBINE if kind == _COMBINE else DIVIDE))
    if kernel == 0:
        return PYTHON
    number = count // load(state + 8 * ITEMSIZE)
    if kind == _COMBINE:
        right = load(state + 8 * (INPUT_AT + load(row + RIGHT))) + load(row + RIGHT_OFFSET)
        combine_with(kernel, (target, left, right, number))
    else:
        divide_by(kernel, (target, number, load(state + 8 * DIVISOR)))
    return DONE


@njit(nogil=True, error_model="numpy")
def advance(state: int, nanoseconds: int) -> int:
    """Continue from the current row; return why it stops."""
    port, rows = load(state + 8 * PORT), load(state + 8 * ROWS)
    number, stop = load(state + 8 * ROW), load(state + 8 * NUM_ROWS)
    answer = DONE
    while number < stop:
        row = rows + number * _ROW_BYTES
        kind = load(row)
        if kind <= _SEND:
            error = post(state, port, row)
            if error != 0:
                answer = fail(state, load(row + SLOT), error, 0, MPI_ERROR)
        elif kind == _WAIT:
            store(state + 8 * ROW, number)  # other threads may read where it waits
            answer = wait(state, port, row, nanoseconds)
        else:
            answer = work(state, row)
        if answer != DONE:
            break
        number += 1
    store(state + 8 * ROW, number)
    if answer == DONE and load(state + 8 * NUMBER) != 0:
        log_completion(state)
    return answer


@njit(nogil=True, error_model="numpy")
def log_completion(state: int) -> None:
    """Mark the run complete in the log."""
    log_end(state, _COMPLETE)


@njit(nogil=True, error_model="numpy")
def log_end(state: int, how: int) -> None:
    """Write the last state of the run into the log, unless a later run has reused its entry."""
    entry = load(state + 8 * LOG) + 8 + load(state + 8 * ENTRY) * _ENTRY_BYTES
    is_ours = load(entry) == load(state + 8 * KEY)
    if is_ours and load(entry + 8) == load(state + 8 * NUMBER):
        store(entry + 24, how)
    store(state + 8 * NUMBER, 0)


@njit(nogil=True, error_model="numpy")
def has_form(array: int, form: int, flags: int) -> bool:
    """Return whether an array object has this dtype object, this shape and at least these flags."""
    ndim = load(form + 8 * NDIM)
    if load(array + DTYPE_FIELD) != load(form + 8 * DTYPE) or load32(array + NDIM_FIELD) != ndim:
        return False
    dimensions, shape = load(array + DIMENSIONS_FIELD), form + 8 * SHAPE
    for i in range(ndim):
        if load(dimensions + 8 * i) != load(shape + 8 * i):
            return False
    return load32(array + FLAGS_FIELD) & flags == flags


@njit(nogil=True, error_model="numpy")
def fits(state: int, x: int, out: int) -> bool:
    """Return whether the execution was made for such arrays; if so, store their addresses.

    `x` and `out` are addresses of NumPy's array objects.
    """
    x_data = out_data = 0
    x_form, out_form = state + 8 * INPUT_FORM, state + 8 * OUTPUT_FORM
    if load(x_form + 8 * EXISTS) != 0:
        if not has_form(x, x_form, CONTIGUOUS | ALIGNED):
            return False
        x_data = load(x + DATA_FIELD)
    if load(out_form + 8 * EXISTS) != 0:
        if not has_form(out, out_form, CONTIGUOUS | ALIGNED | WRITEABLE):
            return False
        out_data = load(out + DATA_FIELD)
    if x_data != 0 and out_data != 0:
        shift = out_data - x_data
        is_apart = shift >= load(x_form + 8 * NUM_BYTES)
        is_apart |= -shift >= load(out_form + 8 * NUM_BYTES)
        if (APART if is_apart else shift) != load(state + 8 * SHIFT):
            return False
    store(state + 8 * INPUT_AT, x_data)
    store(state + 8 * OUTPUT_AT, out_data)
    return True


@njit(nogil=True, error_model="numpy")
def begin(state: int) -> None:
    """Count a run, and enter it in the log of its communicator."""
    port, counter = load(state + 8 * PORT), load(state + 8 * COUNTER)
    number = load(counter) + 1
    store(counter, number)
    if load(state + 8 * HOST_CALLS) != 0:
        store(load(state + 8 * HOST_CALLS) + 8 * (number % _NUM_HOST_CALLS), number)
    log = load(state + 8 * LOG)
    num_entered = load(log)
    at = num_entered % _NUM_ENTRIES
    entry = log + 8 + at * _ENTRY_BYTES
    store(log, num_entered + 1)
    store(entry, load(state + 8 * KEY))
    store(entry + 8, number)
    store(entry + 16, now(port, state))
    store(entry + 24, _UNDER_WAY)
    store(state + 8 * ENTRY, at)
    store(state + 8 * NUMBER, number)
    store(state + 8 * ROW, 0)
    num_tags = load(state + 8 * NUM_TAGS)
    if num_tags != 0:
        store(state + 8 * TAG, load(state + 8 * FIRST_TAG) + number % num_tags)


@njit(nogil=True, error_model="numpy")
def run(state: int, x: int, out: int, nanoseconds: int) -> int:
    """Start a run on two arrays, and advance it for at most `nanoseconds`."""
    if not fits(state, x, out):
        return MISFIT
    begin(state)
    return advance(state, nanoseconds)
