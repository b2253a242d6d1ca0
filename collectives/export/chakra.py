"""Chakra execution traces (MLCommons): a graph of sends, receives and computations, as protobuf.

Sridharan et al. 2023; the schema is `et_def.proto` of github.com/mlcommons/chakra.  ASTRA-sim takes
`prefix` as a workload, or as an algorithm ("all-reduce-implementation-custom" of its system file),
and reads `prefix.RANK.et`.  A file is a sequence of messages, each after its length: the global
metadata, then one node for each task.  The few types that are needed are encoded here, so nothing
must be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from collectives.export.tasks import Task

VERSION = "0.0.4"  # of the schema
COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE = 4, 5, 6  # NodeType
_NODES = {"work": COMP_NODE, "send": COMM_SEND_NODE, "receive": COMM_RECV_NODE}


def trace(tasks: Sequence[Task]) -> Iterator[bytes]:
    """Yield the parts of the file of one rank.

    A node has whole microseconds, so the time of work is rounded to these.  An empty message is
    written as one byte, because ASTRA-sim stops at one without bytes.
    """
    yield _delimited(_text(1, VERSION))
    for number, task in enumerate(tasks):
        yield _delimited(_node(number, task))


def _node(number: int, task: Task) -> bytes:
    """Return a `Node`: id, name, type, data_deps, duration_micros, attr."""
    numbers = {1: number, 3: _NODES[task.kind], 7: round(task.seconds * 1e6)}
    parts = {field: _number(field, value) for field, value in numbers.items() if value}
    parts[2] = _text(2, f"{task.kind}{number}")
    if task.after:
        parts[5] = _bytes(5, b"".join(map(_varint, task.after)))
    parts[10] = b"".join(_bytes(10, attribute) for attribute in _attributes(task))
    return b"".join(parts[field] for field in sorted(parts))


def _attributes(task: Task) -> Iterable[bytes]:
    """Yield the `AttributeProto`s of a node: name, and bool_val, int32_val or int64_val."""
    yield _text(1, "is_cpu_op") + _number(27, 0)
    if task.is_message:
        yield _text(1, "comm_size") + _number(9, task.size_written)
        yield _text(1, "comm_dst" if task.kind == "send" else "comm_src") + _number(7, task.peer)
        yield _text(1, "comm_tag") + _number(7, task.tag)


# The wire format of protobuf: a field is its number and type, and then its value.  A number that is
# 0 is left out, unless it is one of a `oneof`, such as the value of an attribute.


def _varint(value: int) -> bytes:
    """Return a number that is not negative, seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _delimited(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message
