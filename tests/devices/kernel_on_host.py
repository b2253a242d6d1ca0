"""Runs the kernel that interprets device programs on the host, as a C++ compiler makes it.

Each thread of each block of each rank is a thread of the host, so the blocks are really concurrent.
With ThreadSanitizer, what no barrier and no counter orders is noticed, whether or not it has done
any harm: in the kernels of all ranks, and in what their callers write between two runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from collectives.devices import kernel_program
from collectives.devices.interpreter_source import MEMORY, interpreter_source
from collectives.engines import KernelWord
from tests.scenarios.jobs import dtype

# What CUDA has and C++ lacks; and counters.  `Rank` is a process with its device and its caller.
_SHIM = """
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(n)

struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct Dimension { unsigned int x; };
static thread_local Dimension blockIdx, threadIdx, blockDim, gridDim;

struct Block {
    std::mutex mutex;
    std::condition_variable changed;
    unsigned int size = 0, num_come = 0, turn = 0;
    bool all = true, result = true;

    bool meet(bool mine) {
        std::unique_lock<std::mutex> lock(mutex);
        all &= mine;
        if (++num_come < size) {
            const unsigned int before = turn;
            changed.wait(lock, [&] { return turn != before; });
            return result;
        }
        result = all, all = true, num_come = 0, turn++;
        changed.notify_all();
        return result;
    }
};
static thread_local Block* block;
static void __syncthreads() { block->meet(true); }
static bool __syncthreads_and(bool mine) { return block->meet(mine); }

static long long acquired(const long long* word) {
    std::this_thread::yield();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
static long long acquired_from_system(const long long* word) { return acquired(word); }
static void release(long long* word, long long value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
static void release_to_system(long long* word, long long value) { release(word, value); }
static unsigned int read(const unsigned int* word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
static void write(unsigned int* word, long long value) {
    __atomic_store_n(word, (unsigned int)value, __ATOMIC_RELAXED);
}
static long long add_one(long long* word) { return __atomic_fetch_add(word, 1, __ATOMIC_ACQ_REL); }
"""

_VARIANT = """
namespace {name} {{
#define interpret {name}
{code}
#undef interpret
static void run(const void* program, long long run) {{ {name}(*(const Program*)program, run); }}
}}
"""

_MAIN = """
typedef void (*Kernel)(const void*, long long);
static const Kernel KERNELS[] = {{ {kernels} }};

static std::vector<long long> numbers(FILE* file, size_t count) {{
    std::vector<long long> found(count);
    if (fread(found.data(), 8, count, file) != count) exit(3);
    return found;
}}

struct Rank {{
    std::vector<long long> words, starts, counters;
    unsigned int host[4] = {{0, 0, 0, 0}};
    std::vector<char> room, images;
    size_t size;
    char* memory;
}};

static void launch(Kernel kernel, const Rank& rank, unsigned int blocks, unsigned int threads,
                   long long run) {{
    std::vector<Block> all(blocks);
    std::vector<std::thread> running;
    for (Block& each : all) each.size = threads;
    for (unsigned int b = 0; b < blocks; b++)
        for (unsigned int t = 0; t < threads; t++)
            running.emplace_back([&, b, t] {{
                block = &all[b], blockIdx.x = b, threadIdx.x = t;
                gridDim.x = blocks, blockDim.x = threads;
                kernel(rank.words.data(), run);
            }});
    for (std::thread& each : running) each.join();
}}

int main(int, char** names) {{
    FILE* in = fopen(names[1], "rb");
    FILE* out = fopen(names[2], "wb");
    // The kernel; the numbers of ranks, blocks, threads and runs; a rank that does nothing, or -1.
    long long head[6];
    while (fread(head, 8, 6, in) == 6) {{
        std::vector<Rank> ranks(head[1]);
        for (Rank& rank : ranks) {{
            const std::vector<long long> sizes = numbers(in, 2);  // of the memory; where it begins
            rank.size = sizes[0], rank.starts = numbers(in, 3);
            rank.words = numbers(in, {NUM_WORDS});
            rank.room.resize(rank.size + 64), rank.counters.resize(2 * head[1] + 2);
            rank.memory = (char*)(((long long)rank.room.data() + 15 & ~15LL) + sizes[1]);
            rank.images.resize(rank.size * head[4]);
            if (fread(rank.images.data(), 1, rank.images.size(), in) != rank.images.size()) exit(3);
        }}
        for (Rank& rank : ranks) {{
            rank.words[{BARRIER}] = (long long)(rank.counters.data() + 2 * head[1]);
            rank.words[{HOST}] = (long long)rank.host;
            for (int peer = 0; peer < head[1]; peer++) {{
                long long* place = &rank.words[{NUM_HEAD_WORDS} + {RANK_WORDS} * peer];
                place[0] = (long long)ranks[peer].counters.data(), place[1] = 0;
                for (int k = 0; k < 3; k++)
                    place[2 + k] = (long long)ranks[peer].memory + ranks[peer].starts[k];
            }}
        }}
        std::vector<std::thread> callers;
        for (Rank& rank : ranks)
            callers.emplace_back([&] {{
                if (&rank == &ranks[0] + head[5]) return;
                for (long long run = 0; run < head[4]; run++) {{
                    char* image = rank.images.data() + run * rank.size;
                    memcpy(rank.memory, image, rank.size);
                    launch(KERNELS[head[0]], rank, head[2], head[3], run);
                    memcpy(image, rank.memory, rank.size);
                }}
            }});
        std::vector<long long> standing;
        for (Rank& rank : ranks) {{
            const bool waits = head[5] >= 0 && &rank != &ranks[0] + head[5];
            while (waits && read(rank.host + {STANDING}) == 0) std::this_thread::yield();
            standing.push_back(read(rank.host + {STANDING}));
        }}
        for (Rank& rank : ranks) write(rank.host + {GENERATION}, head[5] >= 0);
        for (std::thread& each : callers) each.join();
        for (Rank& rank : ranks) fwrite(rank.images.data(), 1, rank.images.size(), out);
        for (Rank& rank : ranks) standing.push_back(read(rank.host + {ENTERED}));
        fwrite(standing.data(), 8, standing.size(), out);
    }}
    return fclose(out);
}}
"""


class Variant(NamedTuple):
    """A kernel: the NumPy function that combines, or None; and the dtype."""

    function: str | None
    dtype: str

    @property
    def code(self) -> str:
        """Its source, with the counters of the host in place of the GPU's."""
        code = interpreter_source(self.function, dtype(self.dtype))
        assert code is not None and code.count(MEMORY) == 1
        return _VARIANT.format(
            name=f"of_{self.function}_{self.dtype}", code=code.replace(MEMORY, "")
        )


class OnRank(NamedTuple):
    """What one rank has: the words of its program without addresses, and its memory in each run.

    `starts`: of its buffers in the memory.  `shift`: the bytes by which that begins after a
    multiple of 16.
    """

    words: np.ndarray
    starts: Sequence[int]
    shift: int
    images: Sequence[np.ndarray]


class Result(NamedTuple):
    """The memory of each rank after each run; where each waits; how many runs each has entered."""

    memories: Sequence[Sequence[np.ndarray]]
    standing: list[int]
    entered: list[int]


class Launch(NamedTuple):
    """The runs of a program on all ranks: `kernel` is the number of the variant.

    `absent`: a rank whose kernels are not launched; the others stop when they wait for it.
    """

    kernel: int
    num_blocks: int
    num_threads: int
    ranks: Sequence[OnRank]
    absent: int = -1

    def as_bytes(self) -> Iterator[bytes]:
        """What the compiled program reads."""
        num_runs = len(self.ranks[0].images)
        numbers = len(self.ranks), self.num_blocks, self.num_threads, num_runs
        head = self.kernel, *numbers, self.absent
        yield np.array(head, np.int64).tobytes()
        for rank in self.ranks:
            numbers = rank.images[0].size, rank.shift, *rank.starts
            yield np.array(numbers, np.int64).tobytes() + rank.words.tobytes()
            yield b"".join(image.tobytes() for image in rank.images)

    def result(self, data: bytes, at: int) -> tuple[Result, int]:
        """What the program has written from a place on, and where that ends."""
        found = []
        for rank in self.ranks:
            size, num_runs = rank.images[0].size, len(rank.images)
            memory = np.frombuffer(data, np.uint8, size * num_runs, at)
            found.append([*memory.reshape(num_runs, size)])
            at += size * num_runs
        standing, entered = np.frombuffer(data, np.int64, 2 * len(found), at).reshape(2, -1)
        return Result(found, standing.tolist(), entered.tolist()), at + 16 * len(found)


def compiled(variants: Sequence[Variant], folder: Path, *options: str) -> Path:
    """The program that runs kernels.  Without a compiler the test is skipped."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile kernels for the host")
    text, binary = folder / "kernels.cpp", folder / "kernels"
    names = [f"of_{each.function}_{each.dtype}::run" for each in variants]
    main = _MAIN.format(kernels=", ".join(names), **vars(kernel_program), **KernelWord.__members__)
    text.write_text(_SHIM + "".join(each.code for each in variants) + main)
    flags = ["-std=c++14", "-O1", "-w", "-pthread", *options]
    subprocess.run([compiler, *flags, "-o", binary, text], check=True)
    return binary


def results(binary: Path, launches: Sequence[Launch], folder: Path) -> tuple[list[Result], str]:
    """The result of each launch; and ThreadSanitizer's objections."""
    source, target = folder / "launches", folder / "results"
    source.write_bytes(b"".join(part for launch in launches for part in launch.as_bytes()))
    environment = os.environ | {"TSAN_OPTIONS": "exitcode=0 halt_on_error=0"}
    command = [str(binary), str(source), str(target)]
    done = subprocess.run(
        command, check=True, timeout=200, env=environment, capture_output=True, text=True
    )
    data, at, found = target.read_bytes(), 0, []
    for launch in launches:
        one, at = launch.result(data, at)
        found.append(one)
    assert at == len(data)
    return found, done.stderr
