"""The kernels of a GPU give what the host's give, to the bit; every NaN is as good as any.

A C++ compiler compiles the same source for the host, where the threads of a launch run one by one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from collectives.arrays import HOST
from collectives.devices import cuda_source
from collectives.devices.cuda_source import combine_source, divide_source
from collectives.devices.enqueue import THREADS, num_blocks
from collectives.devices.interpreter_source import interpreter_source
from collectives.devices.kernels import CudaKernels
from tests.arrays.test_kernels import (
    COMBINATIONS,
    COMPLEX,
    DTYPES,
    FLOATS,
    NOT_SERVED,
    assert_same_bits,
    at,
    numpys_quotient,
    ordinary,
    special,
)
from tests.scenarios.jobs import dtype

LENGTHS = (0, 1, 7, 16, 33, 1000)
GRIDS = ((1, 1), (1, 32), (3, 5), (7, 64))
PLACES = ("apart", "first", "last")  # of the result: the memory of an operand
NOT_USED = 0x11  # an address that is not to be looked at
MOST = 8  # operands

# What CUDA has and C++ lacks.  A launch can end early, after some of its threads.
SHIM = """
#define __global__
#define __device__

struct alignas(16) uint4 { unsigned int x, y, z, w; };
static struct { unsigned int x; } blockIdx, threadIdx, blockDim, gridDim;

template <typename Thread>
static void launch(unsigned int blocks, unsigned int threads, long long num_run, Thread thread) {
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            if (num_run-- > 0) thread();
}
"""
LAUNCHED = """
#define {kernel} kernel_{name}
namespace of_{name} {{
{code}
}}
extern "C" void {name}(unsigned blocks, unsigned threads, long long num_run, const long long* p) {{
    launch(blocks, threads, num_run, [=] {{ of_{name}::{kernel}({arguments}); }});
}}
#undef {kernel}
"""
ROUNDED = """
extern "C" void round_{name}(const float* x, unsigned short* rounded, long long n) {{
    for (long long i = 0; i < n; i++) rounded[i] = of_add_{name}::stored(x[i]);
}}
"""
NUM_PARAMETERS = {"combine": 12, "divide": 3}
TWO_BYTES = ("float16", "bfloat16")

Launch = Callable[..., None]


class Kernel(NamedTuple):
    """A kernel to compile, under a name of its own."""

    name: str
    kernel: str
    code: str

    def launched(self) -> str:
        arguments = ", ".join(f"p[{i}]" for i in range(NUM_PARAMETERS[self.kernel]))
        return LAUNCHED.format(**self._asdict(), arguments=arguments)


def combining(function: str, name: str) -> Kernel:
    code = combine_source(function, dtype(name))
    assert code is not None
    return Kernel(f"{function}_{name}", "combine", code)


def dividing(name: str) -> Kernel:
    code = divide_source(dtype(name))
    assert code is not None
    return Kernel(f"divide_{name}", "divide", code)


ALL = [*itertools.starmap(combining, COMBINATIONS), *(dividing(name) for name in FLOATS + COMPLEX)]


def compiled(code: str, folder: Path) -> ctypes.CDLL:
    """The library that a C++ compiler makes of kernels.  Without a compiler the test is skipped."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile kernels for the host")
    text, library = folder / "kernels.cpp", folder / "kernels.so"
    text.write_text(SHIM + code)
    options = ["-std=c++14", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "-o", library, text], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    code = [kernel.launched() for kernel in ALL]
    code += [ROUNDED.format(name=name) for name in TWO_BYTES]
    return compiled("".join(code), tmp_path_factory.mktemp("kernels"))


def launch(
    function: Launch, parameters: list[int], shape: tuple[int, int] = (1, 1), num_run: int = 1 << 40
) -> None:
    """Run the threads of a grid of this shape, or only the first ones."""
    words = (ctypes.c_int64 * len(parameters))(*parameters)
    function(*shape, ctypes.c_int64(num_run), words)


class Case(NamedTuple):
    """Operands, in one piece of memory, and how they are combined."""

    memory: np.ndarray
    operands: list[np.ndarray]
    out: np.ndarray
    lefts: int
    shape: tuple[int, int]

    def parameters(self) -> list[int]:
        addresses = [at(x) for x in self.operands]
        unused = [NOT_USED] * (MOST - len(addresses))
        numbers = [self.lefts, len(addresses), self.out.size]
        return [at(self.out), *numbers, *addresses, *unused]


def cases(kind: np.dtype[Any]) -> Iterator[Case]:
    """All numbers of operands and lengths; everything else at random."""
    random = np.random.default_rng(1)
    for num_operands, length in itertools.product(range(1, MOST + 1), LENGTHS):
        yield case(kind, num_operands, length, random)


def case(kind: np.dtype[Any], num_operands: int, length: int, random: np.random.Generator) -> Case:
    """One case; half of all begin at multiples of 16, the others at multiples of an element."""
    step = size_of_part(kind)
    room = length * kind.itemsize + 32 & ~15
    memory = np.zeros(room * (num_operands + 1) + 16, np.uint8)
    start = -at(memory) % 16
    shifts = random.integers(0, 16 // step + 1, num_operands + 1) * step * random.integers(2)
    starts = start + room * np.arange(num_operands + 1) + shifts
    *operands, out = (memory[s : s + length * kind.itemsize].view(kind) for s in starts)
    some = special(kind)
    few = [*some[:2], *random.choice(some, random.choice([1, 3, 30]))]  # the two zeros meet often
    for x in operands:
        x[:] = values(kind, length, few, random)
    place = random.choice(PLACES)
    out = {"first": operands[0], "last": operands[-1]}.get(place, out)
    lefts = int(random.integers(1 << MOST))
    return Case(memory, operands, out, lefts, GRIDS[random.integers(len(GRIDS))])


def size_of_part(kind: np.dtype[Any]) -> int:
    """The number of bytes of which an address must be a multiple."""
    return kind.itemsize // 2 if kind.kind == "c" else kind.itemsize


def values(
    kind: np.dtype[Any], length: int, few: list[Any], random: np.random.Generator
) -> np.ndarray:
    """Ordinary values, with a few others among them: some, many, or nothing else."""
    found = ordinary(kind, length, int(random.integers(1 << 30)))
    is_other = random.random(length) < random.choice([0.05, 0.3, 1.0])
    found[is_other] = random.choice(np.array(few, kind), np.count_nonzero(is_other))
    return found


def hosts(function: str, case: Case) -> np.ndarray:
    """What the host's own kernels give, combining two arrays at a time."""
    result, *others = (x.copy() for x in case.operands)
    for k, x in enumerate(others, 1):
        pair = (x, result) if case.lefts >> k & 1 else (result, x)
        result = host_combined(function, *pair)
    return result


def host_combined(function: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    out = np.empty_like(left)
    with np.errstate(all="ignore"):
        if function == "multiply" and left.dtype.kind == "c":  # NumPy may use fused multiply-add
            out.real = left.real * right.real - left.imag * right.imag
            out.imag = left.real * right.imag + left.imag * right.real
        else:
            HOST.binary(function, left.dtype)(left, right, out)
    return out


def check(run: Launch, function: str, case: Case) -> None:
    """Combine; nothing but the result is to change."""
    want, memory = hosts(function, case), case.memory.copy()
    before = case.out.copy()
    launch(run, case.parameters(), case.shape)
    assert_same_bits(case.out.copy(), want)
    case.out.view(np.uint8)[:] = before.view(np.uint8)
    assert np.array_equal(case.memory, memory)


def check_all(run: Launch, function: str, kind: np.dtype[Any]) -> None:
    if function == "divide":
        check_quotients(run, kind)
        return
    for each in cases(kind):
        check(run, function, each)


def check_quotients(run: Launch, kind: np.dtype[Any]) -> None:
    random = np.random.default_rng(2)
    for length, shape, divisor in itertools.product(LENGTHS, GRIDS, (1, 3, 8, 1001)):
        each = case(kind, 1, length, random)
        x, memory = each.operands[0], each.memory.copy()
        before, want = x.copy(), numpys_quotient(x, divisor)
        launch(run, [at(x), length, divisor], shape)
        assert_same_bits(x.copy(), want)
        x.view(np.uint8)[:] = before.view(np.uint8)
        assert np.array_equal(each.memory, memory)


@pytest.mark.parametrize(("function", "name"), COMBINATIONS)
@pytest.mark.slow
def test_a_kernel_gives_what_the_host_gives(library: ctypes.CDLL, function: str, name: str) -> None:
    check_all(library[f"{function}_{name}"], function, dtype(name))


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize(("function", "name"), COMBINATIONS)
@pytest.mark.slow
def test_special_values_are_combined_as_on_the_host(
    library: ctypes.CDLL, function: str, name: str, is_left: bool
) -> None:
    some = special(dtype(name))
    memory = np.zeros((3, some.size**2), some.dtype)
    left, right, out = memory
    left[:], right[:] = np.repeat(some, some.size), np.tile(some, some.size)
    every = Case(memory.reshape(-1).view(np.uint8), [left, right], out, 2 * is_left, (2, 32))
    check(library[f"{function}_{name}"], function, every)


@pytest.mark.parametrize("name", FLOATS + COMPLEX)
def test_quotients_are_those_of_the_host(library: ctypes.CDLL, name: str) -> None:
    check_all(library[f"divide_{name}"], "divide", dtype(name))


def between(kind: np.dtype[Any]) -> np.ndarray:
    """The float32 numbers at, half-way between and beside those of two bytes; others at random."""
    exact = np.arange(1 << 15, dtype=np.uint16).view(kind).astype(np.float64)
    finite = exact[np.isfinite(exact)]
    infinite = 2 * finite[-1] - finite[-2]  # the number that would come next
    half_way = (finite + np.append(finite[1:], infinite)) / 2
    places = np.concatenate([finite, half_way, [np.inf]]).astype(np.float32)
    beside = [np.nextafter(places, np.float32(way)) for way in (-np.inf, np.inf)]
    bits = np.random.default_rng(3).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    found = np.concatenate([places, *beside, bits.view(np.float32)])
    return np.concatenate([found, -found])


def rounded(library: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    out = np.empty(x.size, np.uint16)
    library[f"round_{name}"](*(ctypes.c_int64(each) for each in (at(x), at(out), x.size)))
    return out.view(dtype(name))


@pytest.mark.parametrize("name", TWO_BYTES)
def test_numbers_are_rounded_to_two_bytes_as_numpy_rounds_them(
    library: ctypes.CDLL, name: str
) -> None:
    with np.errstate(all="ignore"):
        x = between(dtype(name))
        assert_same_bits(rounded(library, name, x), x.astype(dtype(name)))


@pytest.mark.parametrize("name", TWO_BYTES)
def test_no_nan_becomes_a_number(library: ctypes.CDLL, name: str) -> None:
    """The NaN that CUDA's operations give has all bits set but the sign."""
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000], np.uint32)
    assert np.isnan(rounded(library, name, bits.view(np.float32))).all()


@pytest.mark.parametrize("name", DTYPES)
def test_a_thread_takes_16_bytes_if_all_addresses_allow_it(library: ctypes.CDLL, name: str) -> None:
    kind, length, room = dtype(name), 32, 1024
    run = library[f"maximum_{name}" if name == "bool" else f"multiply_{name}"]
    for shifts in itertools.product((0, size_of_part(kind)), repeat=3):
        memory = np.zeros(3 * room + 16, np.uint8)
        starts = [-at(memory) % 16 + room * i + shift for i, shift in enumerate(shifts)]
        left, right, out = (memory[s : s + length * kind.itemsize].view(kind) for s in starts)
        left[:], right[:] = 1, 1
        each = Case(memory, [left, right], out, 0, (1, 64))
        launch(run, each.parameters(), each.shape, num_run=1)
        assert np.count_nonzero(out) == (1 if any(shifts) else 16 // kind.itemsize)


# Faults: what they are of, what is replaced, and by what.
FAULTS = {
    "operands are swapped": (
        ("minimum", "float32"),
        "combined(units[0].elements[j], units[k].elements[j])",
        "combined(units[k].elements[j], units[0].elements[j])",
    ),
    "no operand comes on the left": (("maximum", "float16"), "lefts >> k & 1", "0"),
    "a NaN is lost": (("maximum", "float64"), " || x != x", ""),
    "signs are ignored": (("minimum", "int8"), "signed char Value", "unsigned char Value"),
    "a sum is rounded at the end only": (
        ("add", "float16"),
        "units[0].elements[j] = combined(units[0].elements[j], units[k].elements[j]);",
        """{
            static float sums[8];
            if (k == 1) sums[j] = value(units[0].elements[j]);
            sums[j] += value(units[k].elements[j]);
            units[0].elements[j] = stored(sums[j]);
        }""",
    ),
    "ties are always rounded up": (("add", "bfloat16"), "0x7FFFu + (x.bits >> 16 & 1u)", "0x8000u"),
    "subnormal numbers are flushed": (
        ("add", "float32"),
        "value(Stored x) { return x; }",
        "value(Stored x) { return x < 1.2e-38f && x > -1.2e-38f ? 0.0f : x; }",
    ),
    "a product is fused with a sum": (
        ("multiply", "complex64"),
        "x.real * y.real - x.imaginary * y.imaginary",
        "__builtin_fmaf(x.real, y.real, -(x.imaginary * y.imaginary))",
    ),
    "the last element is forgotten": (
        ("add", "int32"),
        "rest, num_elements);",
        "rest, num_elements - 1);",
    ),
    "the first elements are combined twice": (("add", "int64"), "operands, rest,", "operands, 0,"),
    "the result is written before all is read": (
        ("add", "uint16"),
        "units[k] = at<Unit>(operands[k], i);",
        "units[k] = at<Unit>(operands[k], i), at<Unit>(out, i) = units[0];",
    ),
    "the reciprocal is rounded": (
        ("divide", "float32"),
        "value(unit.elements[j]) / divisor",
        "value(unit.elements[j]) * (1 / divisor)",
    ),
    "the imaginary part is forgotten": (("divide", "complex64"), "x.imaginary * zero", "0"),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    code = []
    for i, ((function, name), old, new) in enumerate(FAULTS.values()):
        right = dividing(name) if function == "divide" else combining(function, name)
        assert right.code.count(old) == 1, old
        wrong = right.code.replace(old, new)
        code.append(Kernel(f"fault{i}", right.kernel, wrong).launched())
    return compiled("".join(code), tmp_path_factory.mktemp("faulty"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(faulty: ctypes.CDLL, fault: str) -> None:
    function, name = FAULTS[fault][0]
    run = faulty[f"fault{list(FAULTS).index(fault)}"]
    with pytest.raises(AssertionError):
        check_all(run, function, dtype(name))


def nvrtc() -> ctypes.CDLL | None:
    """NVIDIA's compiler, out of its wheel or of CUDA, if either is installed."""
    names = ["libnvrtc.so.12", "libnvrtc.so.13"]
    if importlib.util.find_spec("nvidia"):
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
        folders = spec.submodule_search_locations if spec else None
        names = [f"{folder}/lib/{names[0]}" for folder in folders or ()] + names
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


NVRTC = nvrtc()


def ptx(library: ctypes.CDLL, code: str) -> str:
    """What NVIDIA's compiler makes of a source.  Raises AssertionError with its messages."""
    program = ctypes.c_void_p()
    name = b"kernel.cu"
    library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), name, 0, None, None)
    options = [
        option.encode() for option in (*cuda_source.OPTIONS, "--gpu-architecture=compute_80")
    ]
    array = (ctypes.c_char_p * len(options))(*options)
    error = library.nvrtcCompileProgram(program, len(options), array)
    assert error == 0, text(library, "ProgramLog", program)
    found = text(library, "PTX", program)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return found


def text(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    library[f"nvrtcGet{what}"](program, found)
    return found.value.decode()


WITH_NVRTC = pytest.mark.skipif(NVRTC is None, reason="NVIDIA's compiler, NVRTC, is not installed")
NOT_WANTED = {
    "fma.": "a fused multiply-add",
    ".ftz": "subnormal numbers are flushed",
    ".nc.": "a load through the read-only cache",
    ".local": "a local array that is not in registers",
}


def interpreting(function: str | None, name: str) -> Kernel:
    code = interpreter_source(function, dtype(name))
    assert code is not None
    return Kernel(f"interpret_{function}_{name}", "interpret", code)


INTERPRETERS = [
    interpreting(None, "float32"),
    *(interpreting("maximum" if name == "bool" else "add", name) for name in cuda_source.DTYPES),
]


@WITH_NVRTC
@pytest.mark.parametrize("kernel", ALL + INTERPRETERS, ids=lambda kernel: kernel.name)
def test_nvidias_compiler_takes_the_source(kernel: Kernel) -> None:
    assert NVRTC is not None
    found = ptx(NVRTC, kernel.code)
    assert f".entry {kernel.kernel}(" in found
    assert [what for sign, what in NOT_WANTED.items() if sign in found] == []
    assert any(load in found for load in (".v2.u64", ".v2.b64", ".v4"))  # of 16 bytes


@WITH_NVRTC
def test_nvidias_compiler_refuses_what_is_wrong() -> None:
    assert NVRTC is not None
    with pytest.raises(AssertionError, match="identifier"):
        ptx(NVRTC, ALL[0].code.replace("combined(", "combine_them(", 1))


@pytest.mark.parametrize(("function", "kind"), NOT_SERVED, ids=str)
def test_dtypes_and_functions_without_a_kernel_have_no_source(function: str, kind: Any) -> None:
    assert combine_source(function, np.dtype(kind)) is None
    assert interpreter_source(function, np.dtype(kind)) is None


@pytest.mark.parametrize(
    "kind",
    [np.int64, np.bool_, np.longdouble, ">f8", object, "m8[s]", ml_dtypes.float8_e4m3],
    ids=str,
)
def test_dtypes_that_no_kernel_divides_have_no_source(kind: Any) -> None:
    assert divide_source(np.dtype(kind)) is None
    assert combine_source("add", np.dtype(ml_dtypes.int4)) is None


@pytest.mark.parametrize(
    ("of_two_zeros", "comparison"), [("left", "<="), ("right", "<"), ("the negative", None)]
)
def test_numpy_is_asked_which_zero_is_the_lesser(
    monkeypatch: pytest.MonkeyPatch, of_two_zeros: str, comparison: str | None
) -> None:
    def minimum(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        out[...] = {"left": left, "right": right, "the negative": -0.0}[of_two_zeros]

    monkeypatch.setattr(cuda_source, "HOST", SimpleNamespace(binary=lambda function, kind: minimum))
    monkeypatch.setattr(cuda_source, "comparison_of", cuda_source.comparison_of.__wrapped__)
    code = combine_source("minimum", dtype("bfloat16"))
    if comparison is None:
        assert code is None
    else:
        assert code is not None and f"stored(x {comparison} y ||" in code


@pytest.mark.parametrize(
    ("num_bytes", "blocks"),
    [(0, 1), (1, 1), (4096, 1), (4097, 2), (1056 * 4096, 1056), (1 << 40, 1056)],
)
def test_the_grid_of_a_launch_follows_from_the_bytes(num_bytes: int, blocks: int) -> None:
    assert (num_blocks(num_bytes), THREADS) == (blocks, 256)


class FakeCuda:
    """CuPy, as far as kernels need it: compiles nothing, and remembers what it was to compile."""

    def __init__(self) -> None:
        self.device, self.compiled, self.capability = 0, [], "90"
        self.compiler = self
        self.Device = lambda: SimpleNamespace(id=self.device, compute_capability=self.capability)

    def compile_using_nvrtc(
        self, code: str, options: tuple[str, ...], cache_in_memory: bool
    ) -> tuple[bytes, None]:
        self.compiled.append((code, options))
        return str(len(self.compiled)).encode(), None

    class Module:
        def load(self, binary: bytes) -> None:
            self.number = int(binary)

        def get_function(self, name: str) -> Any:
            return SimpleNamespace(ptr=self.number * 1000 + len(name))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=fake))
    return fake


def test_a_kernel_is_compiled_once_for_each_device(cuda: FakeCuda) -> None:
    found = CudaKernels()
    assert cuda.compiled == []
    first = [found.combine("add", dtype("float32")), found.divide(dtype("bfloat16"))]
    assert first == [1007, 2006]
    assert [found.combine("add", dtype("float32")), found.divide(dtype("bfloat16"))] == first
    cuda.device = 1
    assert found.combine("add", dtype("float32")) == 3007
    codes = [combine_source("add", dtype("float32")), divide_source(dtype("bfloat16"))]
    assert cuda.compiled == [(code, cuda_source.OPTIONS) for code in [*codes, codes[0]]]
    assert found.interpret(None, dtype("int64")) == found.interpret(None, dtype("float16")) == 4009
    cuda.capability = "61"
    assert found.interpret(None, dtype("int64")) is None


def test_nothing_is_compiled_for_other_dtypes(cuda: FakeCuda) -> None:
    found = CudaKernels()
    assert found.combine("add", dtype("longdouble")) is None
    assert found.divide(dtype("int32")) is None
    assert cuda.compiled == []


def test_cupy_is_imported_for_an_object_only() -> None:
    code = "import sys, collectives.devices.kernels; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
