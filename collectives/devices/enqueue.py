"""The loop that runs a device program: it enqueues operations on a stream, compiled by numba.

It calls the functions of the driver by address, without the interpreter and without its lock.  It
returns to Python when the whole program is enqueued, at the time limit, for rows that need the
host, and if the ranks must meet.  Its state begins with the words of `executor.py`, so that it
numbers and logs runs with the same code.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit

from collectives.devices import driver, interpreter_source, row_format
from collectives.diagnostics import flight_recorder
from collectives.engines import executor
from collectives.engines.executor import (
    begin,
    call2,
    call3,
    call4,
    caller,
    load,
    load32,
    log_end,
    pause,
    peek,
    store,
)
from collectives.lowering import MOST_OPERANDS, DeviceKind

# Words of a state that the loop on host memory has too.
PORT, TABLE, NUM_ROWS, ROW = executor.PORT, executor.ROWS, executor.NUM_ROWS, executor.ROW
COMBINE, DIVIDE, DIVISOR = executor.COMBINE, executor.DIVIDE, executor.DIVISOR
ITEMSIZE, INTERRUPT, ERROR, FLAG = (
    *(executor.ITEMSIZE, executor.INTERRUPT),
    *(executor.ERROR, executor.FLAG),
)
ENTRY, NUMBER, KEY, COUNTER_AT = executor.ENTRY, executor.NUMBER, executor.KEY, executor.COUNTER
_FIRST = executor.NUM_STATE_WORDS
# Where it enqueues, and how:
(
    STREAM,
    OF_CALLER,
    OWN_STREAM,
    STARTED,
    START,
    ENDED,
    BATCH,
    VALUES,
    PARAMETERS,
    ORDER,
    FIRST_CALL,
    MOST_OUTSTANDING,
    STAGE,
) = range(_FIRST, _FIRST + 13)
# the word by which this rank says that it has come, and the addresses of those of its peers:
MINE, PEERS, NUM_PEERS, TURN, LAST_TURN = range(_FIRST + 13, _FIRST + 18)
# and the functions of the driver.
(
    BATCH_OPERATION,
    COPY_BYTES,
    LAUNCH,
    LAUNCH_TOGETHER,
    RECORD_EVENT,
    WAIT_EVENT,
    QUERY_EVENT,
    IS_CAPTURING,
    NUM_STATE_WORDS,
) = range(_FIRST + 18, _FIRST + 27)

# Words of an order of runs, which follow each other: the event that each records at its end; how
# many operations have been enqueued since that event was known to be complete; whether a run is
# being enqueued; and how many have been.
LAST_EVENT, NUM_OUTSTANDING, IS_OPEN, NUM_RUNS, NUM_ORDER_WORDS = range(5)

# Words of a row: its kind, bytes, number of operands and those on the left; addresses of the
# target, of the operands and of a counter; the value of the counter, and by how much it rises with
# each run.
KIND, SIZE, NUM_OPERANDS, LEFTS, TARGET, OPERANDS, COUNTER, VALUE, RISE, ROW_WORDS = (
    *(0, 1, 2, 3, 4, 5, 13, 14, 15),
    16,
)

# Answers of the loop.
DONE, WAITING, MISFIT = executor.DONE, executor.WAITING, executor.MISFIT
HOST, FULL, DRIVER_ERROR, CHANGED, MEET = range(10, 15)

IDLE, COMING, FOLLOWING, ENQUEUEING, DRAINING = range(5)  # stages of a run

# Whether the start of a run is noted; not so if the caller's stream is captured, or fails.
NOTED, CAPTURED, FAILED = range(3)

# What the word of a rank says: the number of the run, its turn, whether this rank has other arrays
# than in the last turn, and whether the ranks must meet.
TURN_BITS, FLAG_BITS, HAS_CHANGED, MUST_MEET = 22, 2, 2, 1
NUMBER_AT = TURN_BITS + FLAG_BITS
MOST_TURNS = 2**TURN_BITS - 2

# Compiled code is cached until this file changes, so constants of other files are repeated here.
SIGNAL, AWAIT, COPY, COMBINATION, DIVISION = range(5)
KERNEL, KERNEL_THREADS = 14, 512
WAIT_VALUE, WRITE_VALUE, MEMORY_OPERATION_WORDS, NOT_READY, ENQUEUED = 1, 2, 6, 600, 4
FIRST_OF_CAPTURE, LAST_OF_CAPTURE = 900, 909
MOST_IN_BATCH = 64
THREADS, _BYTES_EACH, _MOST_BLOCKS = 256, 16, 1056
_AROUND = 4  # operations on the stream before and after a run
_ROW_BYTES = 8 * ROW_WORDS
assert [*DeviceKind][: DIVISION + 1] == [SIGNAL, AWAIT, COPY, COMBINATION, DIVISION]
assert (WAIT_VALUE, WRITE_VALUE) == (driver.WAIT_VALUE, driver.WRITE_VALUE)
assert (MEMORY_OPERATION_WORDS, NOT_READY) == (driver.MEMORY_OPERATION_WORDS, driver.NOT_READY)
assert (driver.CAPTURING[0], driver.CAPTURING[-1]) == (FIRST_OF_CAPTURE, LAST_OF_CAPTURE)
assert flight_recorder.ENQUEUED == ENQUEUED
assert (row_format.KERNEL, interpreter_source.NUM_THREADS) == (KERNEL, KERNEL_THREADS)
assert (row_format.KIND, row_format.SIZE, row_format.NUM_OPERANDS) == (KIND, SIZE, NUM_OPERANDS)
assert (row_format.LEFTS, row_format.TARGET, OPERANDS) == (LEFTS, TARGET, TARGET + 1)
assert (row_format.COUNTER, row_format.VALUE, row_format.RISE) == (COUNTER, VALUE, RISE)
assert (OPERANDS + MOST_OPERANDS, row_format.ROW_WORDS) == (COUNTER, ROW_WORDS)

call1 = caller(1, ir.IntType(32))
call10 = caller(10, ir.IntType(32))
call11 = caller(11, ir.IntType(32))


# A run of ranks that have met before


@njit(nogil=True, error_model="numpy")
def run(state: int, nanoseconds: int) -> int:
    """Begin a run, which is numbered and logged, and advance it for at most `nanoseconds`."""
    if load(state + 8 * MINE) == 0 or load(state + 8 * TURN) >= load(state + 8 * LAST_TURN):
        return MISFIT
    begin(state)
    is_noted = note_start(state) == NOTED
    come(state, load(state + 8 * NUMBER), 0 if is_noted else MUST_MEET)
    return advance(state, nanoseconds) if is_noted else MEET


@njit(nogil=True, error_model="numpy")
def note_start(state: int) -> int:
    """Note what is on the caller's stream now: the run begins after that, and after nothing later.

    Return NOTED, CAPTURED or FAILED.
    """
    stream, status = load(state + 8 * OF_CALLER), state + 8 * FLAG
    code = call2(load(state + 8 * IS_CAPTURING), (stream, status))
    is_captured = code == 0 and load32(status) != 0
    if code == 0 and not is_captured:
        code = call2(load(state + 8 * RECORD_EVENT), (load(state + 8 * STARTED), stream))
    # The legacy stream waits for all others, so it cannot be used while one of them is captured.
    is_captured = is_captured or is_of_capture(code)
    start = CAPTURED if is_captured else NOTED if code == 0 else FAILED
    store(state + 8 * START, start)
    return start


@njit(nogil=True, error_model="numpy")
def is_of_capture(code: int) -> bool:
    """Return whether an error code says that a stream is captured."""
    return FIRST_OF_CAPTURE <= code <= LAST_OF_CAPTURE


@njit(nogil=True, error_model="numpy")
def come(state: int, number: int, flags: int) -> None:
    """Let the peers see that this rank has come to a run.

    The flags are HAS_CHANGED, MUST_MEET if the run cannot be on the device, or 0.
    """
    turn = load(state + 8 * TURN) + 1
    store(state + 8 * TURN, turn)
    store(state + 8 * STAGE, COMING)
    store(load(state + 8 * MINE), word_of(number, turn, flags))


@njit(nogil=True, error_model="numpy")
def word_of(number: int, turn: int, flags: int) -> int:
    """Return the word that says that a rank has come to a turn."""
    return (((number << TURN_BITS) | turn) << FLAG_BITS) | flags


@njit(nogil=True, error_model="numpy")
def is_late(word: int, mine: int) -> bool:
    """Return whether the word of a peer says that it has not come to the turn of this rank."""
    turns = (1 << TURN_BITS) - 1
    its_turn, turn = (word >> FLAG_BITS) & turns, (mine >> FLAG_BITS) & turns
    return its_turn < turn or (its_turn == turn and word >> FLAG_BITS < mine >> FLAG_BITS)


@njit(nogil=True, error_model="numpy")
def look(state: int) -> int:
    """Return DONE if all peers have come and it is the turn of this run; else see `look_once`.

    If all seem to have come, it looks again: one may have left before the last one came.
    """
    answer = look_once(state)
    if answer in (DONE, CHANGED):
        answer = look_once(state)
    first, mine = peek(load(state + 8 * FIRST_CALL)), load(load(state + 8 * MINE))
    return WAITING if answer == DONE and first not in (0, mine >> NUMBER_AT) else answer


@njit(nogil=True, error_model="numpy")
def look_once(state: int) -> int:
    """Return DONE if all peers have come, else WAITING.

    Return CHANGED if a peer or this rank has other arrays, and MEET if a peer makes this run in
    another way.  A peer that has already come to its next turn was here in this one, and no rank
    had other arrays.
    """
    turn, mine = load(state + 8 * TURN), load(load(state + 8 * MINE))
    answer = CHANGED if mine & HAS_CHANGED != 0 else DONE
    for peer in range(load(state + 8 * NUM_PEERS)):
        word = peek(load(load(state + 8 * PEERS) + 8 * peer))
        its_turn = (word >> FLAG_BITS) & ((1 << TURN_BITS) - 1)
        if its_turn == turn and (word & MUST_MEET != 0 or word >> FLAG_BITS > mine >> FLAG_BITS):
            return MEET
        if is_late(word, mine):
            answer = WAITING
        elif its_turn == turn and word & HAS_CHANGED != 0 and answer == DONE:
            answer = CHANGED
    return answer


# Any run


@njit(nogil=True, error_model="numpy")
def advance(state: int, nanoseconds: int) -> int:
    """Continue a run; wait for peers, or for room on the stream, at most `nanoseconds` each."""
    while load(state + 8 * STAGE) != IDLE:
        stage = load(state + 8 * STAGE)
        if stage == FOLLOWING:
            answer, stage = follow(state), ENQUEUEING
        elif stage == ENQUEUEING:
            answer = enqueue(state)
            stage = DRAINING if answer == FULL else IDLE
            if answer in (FULL, DONE):
                answer = record_event(state)
        else:
            answer = wait(state, nanoseconds)
            stage = FOLLOWING if stage == COMING else ENQUEUEING
        if answer != DONE:
            return answer
        if stage == IDLE:
            return end(state)
        store(state + 8 * STAGE, stage)
    return DONE


@njit(nogil=True, error_model="numpy")
def end(state: int) -> int:
    """End a run of which all is enqueued."""
    places = load(state + 8 * ENDED), load(state + 8 * STREAM)
    if places[0] != 0 and failed(state, call2(load(state + 8 * RECORD_EVENT), places)):
        return DRIVER_ERROR
    store(load(state + 8 * ORDER) + 8 * IS_OPEN, 0)
    store(state + 8 * STAGE, IDLE)
    if load(state + 8 * NUMBER) != 0:
        log_end(state, ENQUEUED)
    return DONE


@njit(nogil=True, error_model="numpy")
def failed(state: int, code: int) -> bool:
    """Store the error code of a function of the driver; return whether it is an error."""
    store(state + 8 * ERROR, code)
    return code != 0


@njit(nogil=True, error_model="numpy")
def wait(state: int, nanoseconds: int) -> int:
    """Wait for the peers, or until the device has done all that is enqueued."""
    port, started, tries = load(state + 8 * PORT), 0, 0
    while True:
        answer = look(state) if load(state + 8 * STAGE) == COMING else query(state)
        if answer != WAITING:
            return answer
        tries += 1
        started = pause(state, port, nanoseconds, tries, started)
        if started < 0:
            return WAITING


@njit(nogil=True, error_model="numpy")
def query(state: int) -> int:
    """Return DONE if the device has done all that is enqueued; then the stream has room again."""
    order = load(state + 8 * ORDER)
    code = call1(load(state + 8 * QUERY_EVENT), (load(order + 8 * LAST_EVENT),))
    if code == NOT_READY or is_of_capture(code):  # another thread may capture a stream
        return WAITING
    store(order + 8 * NUM_OUTSTANDING, 0)
    return DRIVER_ERROR if failed(state, code) else DONE


@njit(nogil=True, error_model="numpy")
def record_event(state: int) -> int:
    """Record on the stream that the device has come so far."""
    places = load(load(state + 8 * ORDER) + 8 * LAST_EVENT), load(state + 8 * STREAM)
    code = call2(load(state + 8 * RECORD_EVENT), places)
    return DRIVER_ERROR if failed(state, code) else DONE


@njit(nogil=True, error_model="numpy")
def follow(state: int) -> int:
    """Begin after the last run and after the start that was noted, with higher values.

    The run is enqueued on the caller's stream, unless it has a stream of its own.
    """
    answer, order = query(state), load(state + 8 * ORDER)
    if answer == DRIVER_ERROR:
        return answer
    stream = load(state + 8 * OWN_STREAM)
    wait_event, is_own = load(state + 8 * WAIT_EVENT), stream != 0
    if not is_own:
        stream = load(state + 8 * OF_CALLER)
    store(state + 8 * STREAM, stream)
    if failed(state, call3(wait_event, (stream, load(order + 8 * LAST_EVENT), 0))):
        return DRIVER_ERROR
    if is_own and failed(state, call3(wait_event, (stream, load(state + 8 * STARTED), 0))):
        return DRIVER_ERROR
    store(order + 8 * NUM_OUTSTANDING, load(order + 8 * NUM_OUTSTANDING) + _AROUND)
    store(order + 8 * IS_OPEN, 1)
    store(order + 8 * NUM_RUNS, load(order + 8 * NUM_RUNS) + 1)
    rows = load(state + 8 * TABLE)
    for number in range(load(state + 8 * NUM_ROWS)):
        value = rows + _ROW_BYTES * number + 8 * VALUE
        store(value, load(value) + load(value + 8 * (RISE - VALUE)))
    store(state + 8 * ROW, 0)
    return DONE


@njit(nogil=True, error_model="numpy")
def enqueue(state: int) -> int:
    """Enqueue operations from the current row on; return why it stops."""
    rows, stop = load(state + 8 * TABLE), load(state + 8 * NUM_ROWS)
    number, answer, order = load(state + 8 * ROW), DONE, load(state + 8 * ORDER)
    while number < stop:
        row = rows + _ROW_BYTES * number
        kind = load(row)
        if kind > DIVISION and kind != KERNEL:
            answer = HOST
            break
        outstanding = load(order + 8 * NUM_OUTSTANDING)
        if outstanding >= load(state + 8 * MOST_OUTSTANDING):
            answer = FULL
            break
        num_rows = 1
        if kind <= AWAIT:
            left = min(stop - number, load(state + 8 * MOST_OUTSTANDING) - outstanding)
            num_rows = batch(state, row, min(left, MOST_IN_BATCH))
        elif kind == COPY:
            copy(state, row)
        elif kind == KERNEL:
            launch_program(state, row)
        else:
            launch(state, row, kind)
        if load(state + 8 * ERROR) != 0:
            answer = DRIVER_ERROR
            break
        store(order + 8 * NUM_OUTSTANDING, outstanding + num_rows)
        number += num_rows
    store(state + 8 * ROW, number)
    return answer


@njit(nogil=True, error_model="numpy")
def batch(state: int, row: int, most: int) -> int:
    """Enqueue the signals and awaits from a row on as one call; return their number."""
    operations, count = load(state + 8 * BATCH), 0
    while count < most and load(row) <= AWAIT:
        at = operations + 8 * MEMORY_OPERATION_WORDS * count
        store(at, WRITE_VALUE if load(row) == SIGNAL else WAIT_VALUE)
        store(at + 8, load(row + 8 * COUNTER))
        store(at + 16, load(row + 8 * VALUE))
        store(at + 24, 0)
        row += _ROW_BYTES
        count += 1
    function, stream = load(state + 8 * BATCH_OPERATION), load(state + 8 * STREAM)
    store(state + 8 * ERROR, call4(function, (stream, count, operations, 0)))
    return count


@njit(nogil=True, error_model="numpy")
def copy(state: int, row: int) -> None:
    """Enqueue a copy."""
    places = load(row + 8 * TARGET), load(row + 8 * OPERANDS)
    function, stream = load(state + 8 * COPY_BYTES), load(state + 8 * STREAM)
    store(state + 8 * ERROR, call4(function, (places[0], places[1], load(row + 8 * SIZE), stream)))


@njit(nogil=True, error_model="numpy")
def num_blocks(num_bytes: int) -> int:
    """Return the number of blocks of a kernel on so many bytes; a thread takes 16 at a time."""
    block_bytes = THREADS * _BYTES_EACH
    return max(1, min((num_bytes + block_bytes - 1) // block_bytes, _MOST_BLOCKS))


@njit(nogil=True, error_model="numpy")
def launch(state: int, row: int, kind: int) -> None:
    """Enqueue the kernel of a combination or a division."""
    values, num_bytes = load(state + 8 * VALUES), load(row + 8 * SIZE)
    num_elements = num_bytes // load(state + 8 * ITEMSIZE)
    store(values, load(row + 8 * TARGET))
    if kind == COMBINATION:
        kernel = load(state + 8 * COMBINE)
        store(values + 8, load(row + 8 * LEFTS))
        store(values + 16, load(row + 8 * NUM_OPERANDS))
        store(values + 24, num_elements)
        for k in range(8):
            store(values + 8 * (4 + k), load(row + 8 * (OPERANDS + k)))
    else:
        kernel = load(state + 8 * DIVIDE)
        store(values + 8, num_elements)
        store(values + 16, load(state + 8 * DIVISOR))
    shape = (kernel, num_blocks(num_bytes), 1, 1, THREADS, 1, 1, 0)
    end = load(state + 8 * STREAM), load(state + 8 * PARAMETERS), 0
    store(state + 8 * ERROR, call11(load(state + 8 * LAUNCH), shape + end))


@njit(nogil=True, error_model="numpy")
def launch_program(state: int, row: int) -> None:
    """Enqueue the kernel that runs a whole program, with its words and the number of the run."""
    parameters = load(state + 8 * VALUES)
    store(parameters, load(row + 8 * OPERANDS))
    store(parameters + 8, row + 8 * VALUE)
    shape = (load(row + 8 * TARGET), load(row + 8 * SIZE), 1, 1, KERNEL_THREADS, 1, 1, 0)
    end = load(state + 8 * STREAM), parameters
    store(state + 8 * ERROR, call10(load(state + 8 * LAUNCH_TOGETHER), shape + end))
