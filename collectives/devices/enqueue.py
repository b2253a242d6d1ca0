"""The loop that enqueues a device program on a stream, compiled by numba.

It calls the functions of the driver by address, without the interpreter and without its lock.  It
returns to Python for rows that need the host, and when too many operations are outstanding.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit

from collectives.devices import driver, table
from collectives.engines.executor import call4, caller, load, store
from collectives.lowering import MOST_OPERANDS, DeviceKind

# Words of a state, one for each execution.
(STREAM, TABLE, NUM_ROWS, ROW, BATCH, VALUES, PARAMETERS, COMBINE, DIVIDE, DIVISOR, ITEMSIZE,
 NUM_OUTSTANDING, MOST_OUTSTANDING, ERROR, BATCH_OPERATION, COPY_BYTES, LAUNCH,
 NUM_STATE_WORDS) = range(18)  # fmt: skip

# Words of a row: its kind, bytes, number of operands and those on the left; addresses of the
# target, of the operands and of a counter; the value of the counter.
KIND, SIZE, NUM_OPERANDS, LEFTS, TARGET, OPERANDS, COUNTER, VALUE, ROW_WORDS = (
    *(0, 1, 2, 3, 4, 5, 13, 14),
    16,
)

DONE, HOST, FULL, DRIVER_ERROR = range(4)  # answers of the loop

# Compiled code is cached until this file changes, so constants of other files are repeated here.
SIGNAL, AWAIT, COPY, COMBINATION, DIVISION = range(5)
WAIT_VALUE, WRITE_VALUE, MEMORY_OPERATION_WORDS = 1, 2, 6
MOST_IN_BATCH = 64
THREADS, _BYTES_EACH, _MOST_BLOCKS = 256, 16, 1056
assert [*DeviceKind][: DIVISION + 1] == [SIGNAL, AWAIT, COPY, COMBINATION, DIVISION]
assert (WAIT_VALUE, WRITE_VALUE) == (driver.WAIT_VALUE, driver.WRITE_VALUE)
assert driver.MEMORY_OPERATION_WORDS == MEMORY_OPERATION_WORDS
assert (*(table.KIND, table.SIZE, table.NUM_OPERANDS, table.LEFTS, table.TARGET),) == (
    KIND,
    SIZE,
    NUM_OPERANDS,
    LEFTS,
    TARGET,
)
assert (OPERANDS, COUNTER) == (TARGET + 1, OPERANDS + MOST_OPERANDS)
assert (COUNTER, VALUE, ROW_WORDS) == (table.COUNTER, table.VALUE, table.ROW_WORDS)

call11 = caller(11, ir.IntType(32))


@njit(nogil=True, error_model="numpy")
def enqueue(state: int) -> int:
    """Enqueue operations from the current row on; return why it stops."""
    rows, stop = load(state + 8 * TABLE), load(state + 8 * NUM_ROWS)
    number, answer = load(state + 8 * ROW), DONE
    while number < stop:
        row = rows + 8 * ROW_WORDS * number
        kind = load(row)
        if kind > DIVISION:
            answer = HOST
            break
        outstanding = load(state + 8 * NUM_OUTSTANDING)
        if outstanding >= load(state + 8 * MOST_OUTSTANDING):
            answer = FULL
            break
        num_rows = 1
        if kind <= AWAIT:
            left = min(stop - number, load(state + 8 * MOST_OUTSTANDING) - outstanding)
            num_rows = batch(state, row, min(left, MOST_IN_BATCH))
        elif kind == COPY:
            copy(state, row)
        else:
            launch(state, row, kind)
        if load(state + 8 * ERROR) != 0:
            answer = DRIVER_ERROR
            break
        store(state + 8 * NUM_OUTSTANDING, outstanding + num_rows)
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
        row += 8 * ROW_WORDS
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
    """The blocks of threads of a kernel on so many bytes; each thread has 16 bytes at a time."""
    each = THREADS * _BYTES_EACH
    return max(1, min((num_bytes + each - 1) // each, _MOST_BLOCKS))


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
