"""MSCCL's XML, run on numbers: every rank ends with what its collective promises."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import algorithms
from collectives.export import Call, msccl
from collectives.export.fusion import Place
from collectives.programs import INPUT, OUTPUT
from collectives.schedule import after, before
from collectives.selection import choose
from tests.export.msccl_interpreter import Machine

Vector = NDArray[np.int64]
SIZES = (1, 2, 3, 4, 5, 8)


def inputs_and_outputs(call: Call) -> tuple[list[Vector], list[Vector]]:
    """Numbers for all inputs, and the outputs of the collective: sums over who holds a block."""
    chosen = choose(call.collective, call.algorithm, call.size, call.num_bytes)
    case = chosen.algorithm.case(call.size, call.root, **chosen.options)
    held = [list(before(call.collective, rank, case)) for rank in range(call.size)]
    numbers = np.random.default_rng(call.size)
    inputs = [numbers.integers(0, 1000, len(blocks)) for blocks in held]
    totals: dict[object, int] = {}
    for blocks, values in zip(held, inputs, strict=True):
        for block, value in zip(blocks, values, strict=True):
            totals[block] = totals.get(block, 0) + int(value)
    outputs = [
        np.array([totals[block] for block in after(call.collective, rank, case)], np.int64)
        for rank in range(call.size)
    ]
    return inputs, outputs


@pytest.mark.parametrize("collective", msccl.COLLECTIVES)
def test_outputs_are_those_of_the_collective(collective: str) -> None:
    for name in algorithms.names(collective):
        for size in filter(algorithms.info(collective, name).serves, SIZES):
            call = Call(collective, size, 1, name, root=size // 2)
            inputs, outputs = inputs_and_outputs(call)
            results = Machine(call.msccl(), inputs, seed=size).run()
            for result, expected in zip(results, outputs, strict=True):
                np.testing.assert_array_equal(result, expected, str(call))


RING = Call("all_reduce", 4, 1, "ring")


def test_a_ring_combines_as_it_receives() -> None:
    types = re.findall('type="(.*?)"', RING.msccl())
    assert {kind: types.count(kind) for kind in set(types)} == {
        "s": 24,
        "r": 12,
        "rrc": 12,
        "nop": 8,
    }


def test_without_dependencies_results_are_wrong() -> None:
    """The interpreter runs thread blocks in any order that the file allows."""
    inputs, outputs = inputs_and_outputs(RING)
    free = re.sub('depid="[0-9]+"', 'depid="-1"', RING.msccl())
    runs = [Machine(free, inputs, seed=seed).run() for seed in range(5)]
    assert not all(np.array_equal(outputs_of_run, outputs) for outputs_of_run in runs)


def test_a_circle_of_dependencies_is_found() -> None:
    root = ElementTree.fromstring(RING.msccl())
    send, receive = (block for block in root[0] if "1" in (block.get("send"), block.get("recv")))
    if send.get("send") != "1":
        send, receive = receive, send
    send[0].attrib |= {"depid": receive.attrib["id"], "deps": "2"}
    inputs, _ = inputs_and_outputs(RING)
    with pytest.raises(AssertionError, match="wait forever"):
        Machine(ElementTree.tostring(root, "unicode"), inputs).run()


def test_more_than_the_runtime_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"256 steps in a thread block at most; .* 257"):
        Call("broadcast", 2, 1, "pipeline(segments=257)").msccl()
    with pytest.raises(ValueError, match="MSCCL has no scan; it has all_reduce"):
        Call("scan", 4, 1, "linear").msccl()


def test_a_step_has_as_many_blocks_as_the_runtime_takes() -> None:
    step = msccl.Step("s", Place(INPUT, 5, 155), Place(OUTPUT, 0, 150))
    pieces = list(msccl.pieces(step))
    assert [piece.source for piece in pieces] == [
        Place(INPUT, 5, 76),
        Place(INPUT, 76, 147),
        Place(INPUT, 147, 155),
    ]
    assert [piece.into.start for piece in pieces] == [0, 71, 142]
