"""The kernel that runs whole device programs, in CUDA C++: one launch for each call.

Blocks run the rows of a program in step.  A signal is written into the memory of the rank that
awaits it, which looks for it in its own.  A block that has waited for long shows the host where it
stands, and leaves if the host says so.  `kernel_program.py` has the words that it reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.devices import kernel_program as program
from collectives.devices.cuda_source import UNTYPED, combining, dividing
from collectives.engines import KernelWord
from collectives.lowering import DeviceKind

NUM_THREADS = 512  # of a block

_CONSTANTS = {
    "NUM_WORDS": program.NUM_WORDS,
    "RANK": program.RANK,
    "FIRST": program.FIRST,
    "END": program.END,
    "DIVISOR": program.DIVISOR,
    "BARRIER": program.BARRIER,
    "HOST": program.HOST,
    "NUM_HEAD_WORDS": program.NUM_HEAD_WORDS,
    "RANK_WORDS": program.RANK_WORDS,
    "NUM_BUFFERS": program.RANK_WORDS - 2,
    "GENERATION_AT": program.GENERATION_AT,
    "NUM_THREADS": NUM_THREADS,
    "BARRIER_AT": program.BARRIER_AT,
    "COUNT_AT": program.COUNT_AT,
    "LEFTS_AT": program.LEFTS_AT,
    "NUMBER_AT": program.NUMBER_AT,
    "PEER_AT": program.PEER_AT,
    "IS_READ_AT": program.IS_READ_AT,
    "BASE_AT": program.BASE_AT,
    **{member.name: int(member) for member in (*DeviceKind, *KernelWord)},
}

# Counters are raised and read in the order of all memory of the system, barriers in that of the
# GPU.  Nothing here may be loaded through a cache that does not see what others write.
MEMORY = """
__device__ Word acquired_from_system(const Word* counter) {
    Word value;
    asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
    return value;
}

__device__ void release_to_system(Word* counter, Word value) {
    __threadfence_system();
    asm volatile("st.release.sys.global.s64 [%0], %1;" : : "l"(counter), "l"(value) : "memory");
}

__device__ Word acquired(const Word* word) {
    Word value;
    asm volatile("ld.acquire.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ void release(Word* word, Word value) {
    asm volatile("st.release.gpu.global.s64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

// The value before.  What this thread has seen or done before comes before what whoever adds later
// does then.
__device__ Word add_one(Word* word) {
    Word value;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;"
                 : "=l"(value) : "l"(word) : "memory");
    return value;
}

// Words in the memory of the host, in no order with anything else.
__device__ unsigned int read(const unsigned int* word) {
    unsigned int value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word));
    return value;
}

__device__ void write(unsigned int* word, Word value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(word), "r"((unsigned int)value));
}
"""

_WAITING = """
struct Program {
    Word words[NUM_WORDS];
};

// What the kernel and the host know of each other.
struct Host {
    unsigned int* words;
    unsigned int generation;
};

// Whether a wait that has not ended goes on.  It is asked for in every round of the wait, and looks
// at the memory of the host now and then.  Operation 0 is no place to stand at.
__device__ bool goes_on(unsigned int& rounds, Host host, Word operation) {
    if (++rounds % 1024 != 0) return true;
    if (blockIdx.x == 0 && operation != 0) write(host.words + STANDING, operation);
    return read(host.words + GENERATION) == host.generation;
}

// Whether a counter has come to a value; if not, the kernel leaves.
__device__ bool has_come(const Word* counter, Word value, Host host, Word operation) {
    unsigned int rounds = 0;
    while (acquired_from_system(counter) < value)
        if (!goes_on(rounds, host, operation)) return false;
    if (rounds >= 1024 && blockIdx.x == 0) write(host.words + STANDING, 0);
    return true;
}

// Whether all blocks have come; if not, the kernel leaves.
__device__ bool have_all_come(Word* barrier, Host host) {
    bool have_come = true;
    __syncthreads();
    if (threadIdx.x == 0 && gridDim.x > 1) {
        const Word turn = acquired(barrier + 1);
        if (add_one(barrier) == gridDim.x - 1) {
            *barrier = 0;
            release(barrier + 1, turn + 1);
        } else {
            unsigned int rounds = 0;
            while (have_come && acquired(barrier + 1) == turn) have_come = goes_on(rounds, host, 0);
        }
    }
    return __syncthreads_and(have_come);
}
"""

_COPY = """
template <typename Unit>
__device__ void copy_units(Word out, Word in, Word begin, Word end) {
    for (Word i = begin + thread(); i < end; i += num_threads()) at<Unit>(out, i) = at<Unit>(in, i);
}

__device__ void copy_all(Word out, Word in, Word num_bytes) {
    const Word vectors = (out | in) % 16 ? 0 : num_bytes / 16;
    const Word words = (out | in) % 4 ? vectors * 4 : num_bytes / 4;
    copy_units<uint4>(out, in, 0, vectors);
    copy_units<unsigned int>(out, in, vectors * 4, words);
    copy_units<unsigned char>(out, in, words * 4, num_bytes);
}
"""

_INTERPRET = """
__device__ Word place(const Program& program, Word word) {
    const Word base = word >> BASE_AT, rank = base / NUM_BUFFERS;
    const Word at = NUM_HEAD_WORDS + RANK_WORDS * rank + 2 + base % NUM_BUFFERS;
    return program.words[at] + (word & ((Word)1 << BASE_AT) - 1);
}

// Copies, combines or divides what this thread has of it.
__device__ void work(const Program& program, Word at) {
    const Word head = program.words[at], num_bytes = program.words[at + 1];
    const Word num_operands = head >> COUNT_AT & 255, out = place(program, program.words[at + 2]);
    Word operands[8];
    #pragma unroll
    for (int k = 0; k < 8; k++)
        operands[k] = k < num_operands ? place(program, program.words[at + 3 + k]) : out;
    if ((head & 255) == COPY) copy_all(out, operands[0], num_bytes);
    compute(head & 255, out, head >> LEFTS_AT & 255, num_operands, operands, num_bytes,
            program.words[DIVISOR]);
}

// Signals, or waits for what this thread has of the counters of a row; if one does not come, the
// kernel leaves.
__device__ bool synchronize(const Program& program, Word at, Word run, Host host) {
    const Word head = program.words[at], me = program.words[RANK];
    const bool is_signal = (head & 255) == SIGNAL;
    bool have_come = true;
    for (Word i = threadIdx.x; i < (head >> COUNT_AT & 255); i += blockDim.x) {
        const Word word = program.words[at + 1 + 2 * i], peer = word >> PEER_AT & 255;
        const Word is_read = word >> IS_READ_AT & 1, reader = is_signal ? peer : me;
        const Word writer = is_signal ? me : peer, ranks = NUM_HEAD_WORDS + RANK_WORDS * reader;
        Word* counter = (Word*)program.words[ranks] + 2 * writer + is_read;
        const Word value = program.words[ranks + 1] + run * program.words[at + 2 + 2 * i]
            + (word & 0xFFFFFFFF);
        if (is_signal) release_to_system(counter, value);
        else have_come &= has_come(counter, value, host, (head >> NUMBER_AT) + i + 1);
    }
    return have_come;
}

// The bound keeps the registers of a thread so few that a block fits on every GPU.
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
interpret(const __grid_constant__ Program program, Word run) {
    const Word floor = program.words[NUM_HEAD_WORDS + RANK_WORDS * program.words[RANK] + 1];
    const Host host = {(unsigned int*)program.words[HOST], (unsigned int)(floor >> GENERATION_AT)};
    if (blockIdx.x == 0 && threadIdx.x == 0) write(host.words + ENTERED, run + 1);
    Word at = program.words[FIRST];
    while (at < program.words[END]) {
        const Word head = program.words[at], kind = head & 255, count = head >> COUNT_AT & 255;
        if (head >> BARRIER_AT & 1 && !have_all_come((Word*)program.words[BARRIER], host)) return;
        if (kind == AWAIT && !__syncthreads_and(synchronize(program, at, run, host))) return;
        if (kind == SIGNAL && blockIdx.x == 0) synchronize(program, at, run, host);
        if (kind > AWAIT) work(program, at);
        at += kind > AWAIT ? 3 + count : 1 + 2 * count;
    }
}
"""

_COMPUTE = """
__device__ void compute(Word kind, Word out, Word lefts, Word num_operands,
                        const Word (&operands)[8], Word num_bytes, Word divisor) {{
    {}
}}
"""
_COMBINES = (
    "if (kind == COMBINE)"
    " combine_all(out, lefts, num_operands, operands, num_bytes / sizeof(Stored));"
)
_DIVIDES = "if (kind == DIVIDE) divide_all(out, num_bytes / sizeof(Stored), divisor);"


def interpreter_source(function: str | None, dtype: np.dtype[Any]) -> str | None:
    """Return the source of the kernel `interpret`, or None.

    With the name of a NumPy function, the kernel combines arrays of this dtype with it, and divides
    them if the function adds.  With None it only copies.
    """
    parts = UNTYPED if function is None else combining(function, dtype)
    if parts is None:
        return None
    divided = dividing(dtype) if function == "add" else None
    statements = [_COMBINES] * (function is not None) + [_DIVIDES] * (divided is not None)
    compute = _COMPUTE.format("\n    ".join(statements))
    constants = "".join(f"#define {name} {value}\n" for name, value in _CONSTANTS.items())
    return constants + parts + (divided or "") + MEMORY + _WAITING + _COPY + compute + _INTERPRET
