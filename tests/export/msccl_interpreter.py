"""Runs an XML file of MSCCL on numbers, thread block by thread block, as its runtime does.

The checks are those of the runtime's parser (src/graph/topo.cc of github.com/microsoft/msccl).
"""

from __future__ import annotations

from collections import defaultdict, deque
from random import Random
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.int64]
SENDS, RECEIVES = ("s", "rcs", "rrs", "rrcs"), ("r", "rcs", "rrs", "rrc", "rrcs")
MULTIPLIERS = {"allgather": ("i_chunks",), "reduce_scatter": ("o_chunks",)}


class ThreadBlock:
    """The steps of a thread block of a GPU, and how many of them have ended."""

    def __init__(self, gpu: int, element: ElementTree.Element) -> None:
        self.gpu = gpu
        self.send, self.receive, self.channel = (
            int(element.attrib[name]) for name in ("send", "recv", "chan")
        )
        self.steps = [step.attrib for step in element]
        self.num_done = 0
        assert [int(step["s"]) for step in self.steps] == [*range(len(self.steps))]
        assert len(self.steps) <= 256 and 0 <= self.channel < 32
        assert gpu not in (self.send, self.receive)


class Machine:
    """All GPUs.  A connection holds one step's data at most, the least that any runtime has."""

    def __init__(self, text: str, inputs: list[Vector], *, seed: int = 0) -> None:
        self.root = ElementTree.fromstring(text)
        self.random = Random(seed)
        self.memory: list[dict[str, Vector]] = []
        self.blocks: list[list[ThreadBlock]] = []
        for number, gpu in enumerate(self.root):
            assert int(gpu.attrib["id"]) == number
            self.check_sizes(gpu.attrib)
            sizes = {name: int(gpu.attrib[f"{name}_chunks"]) for name in "ios"}
            assert sizes["i"] == len(inputs[number])
            self.memory.append({name: np.full(size, -(10**6)) for name, size in sizes.items()})
            self.memory[-1]["i"][:] = inputs[number]
            self.blocks.append([ThreadBlock(number, block) for block in gpu])
            assert [int(block.attrib["id"]) for block in gpu] == [*range(len(gpu))]
        self.check_connections()
        self.wires: dict[tuple[int, int, int], deque[Vector]] = defaultdict(deque)

    def check_sizes(self, attributes: dict[str, str]) -> None:
        """Buffers must be nchunksperloop, or a part of it for each rank, or absent."""
        for name in ("i_chunks", "o_chunks"):
            times = int(self.root.attrib["ngpus"])
            num_chunks = int(attributes[name])
            if name not in MULTIPLIERS.get(self.root.attrib["coll"], ()):
                times = 1
            assert num_chunks in (0, int(self.root.attrib["nchunksperloop"]) // times)

    def check_connections(self) -> None:
        """A connection has one thread block at each end, and a channel at most 32 peers."""
        for blocks in self.blocks:
            for side in ("send", "receive"):
                ends = [
                    (block.channel, peer) for block in blocks if (peer := getattr(block, side)) >= 0
                ]
                assert len(set(ends)) == len(ends)
                channels = [channel for channel, _ in ends]
                assert all(channels.count(channel) <= 32 for channel in channels)
                assert all(channel < int(self.root.attrib["nchannels"]) for channel in channels)

    def run(self) -> list[Vector]:
        """The outputs.  Thread blocks move in a random order; fails if they wait forever."""
        every = [block for blocks in self.blocks for block in blocks]
        while left := [block for block in every if block.num_done < len(block.steps)]:
            self.random.shuffle(left)
            assert any(list(map(self.advance, left))), "the thread blocks wait forever"
        assert not any(self.wires.values()), "data was not received"
        return [memory["o"] for memory in self.memory]

    def advance(self, block: ThreadBlock) -> bool:
        """Do the next step, unless it must wait."""
        step = block.steps[block.num_done]
        if not self.may_begin(block, step):
            return False
        self.do(block, step)
        block.num_done += 1
        return True

    def may_begin(self, block: ThreadBlock, step: dict[str, str]) -> bool:
        other, ended = int(step["depid"]), int(step["deps"])
        if other >= 0:
            awaited = self.blocks[block.gpu][other]
            assert awaited.steps[ended]["hasdep"] == "1", "a step is waited for without hasdep"
            if awaited.num_done <= ended:
                return False
        kind = step["type"]
        if kind in SENDS and self.wires[block.gpu, block.send, block.channel]:
            return False
        return kind not in RECEIVES or bool(self.wires[block.receive, block.gpu, block.channel])

    def do(self, block: ThreadBlock, step: dict[str, str]) -> None:
        kind, count = step["type"], int(step["cnt"])
        if kind == "nop":
            return
        assert 0 < count < 72
        memory = self.memory[block.gpu]
        source: Any = self.view(memory, step, "src") if kind not in ("r", "rcs") else None
        value = source
        if kind in RECEIVES:
            value = self.wires[block.receive, block.gpu, block.channel].popleft()
            assert len(value) == count
            value = value + source if kind.startswith("rr") else value
        if kind == "re":
            value = source + self.view(memory, step, "dst")
        if kind not in ("s", "rrs"):
            self.view(memory, step, "dst")[:] = value
        if kind in SENDS:
            self.wires[block.gpu, block.send, block.channel].append(value.copy())

    def view(self, memory: dict[str, Vector], step: dict[str, str], end: str) -> Vector:
        start, count = int(step[f"{end}off"]), int(step["cnt"])
        elements = memory[step[f"{end}buf"]][start : start + count]
        assert start >= 0 and len(elements) == count, f"{step} is out of bounds"
        return elements
