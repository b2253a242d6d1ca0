"""Chakra's files, read by protobuf itself: messages in pairs, no circles, the predicted bytes.

Collected where protobuf is installed (the `dev` extra).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from collectives.export import Call, Task, chakra
from tests.export import calls

# The fields that are used of the schema: names, numbers and types (github.com/mlcommons/chakra).
SCHEMA = {
    "AttributeProto": {
        "name": (1, "STRING"),
        "int32_val": (7, "INT32"),
        "int64_val": (9, "INT64"),
        "bool_val": (27, "BOOL"),
    },
    "GlobalMetadata": {"version": (1, "STRING"), "attr": (2, "AttributeProto")},
    "Node": {
        "id": (1, "UINT64"),
        "name": (2, "STRING"),
        "type": (3, "INT32"),
        "data_deps": (5, "REPEATED"),
        "duration_micros": (7, "UINT64"),
        "attr": (10, "AttributeProto"),
    },
}


def classes() -> dict[str, Any]:
    """The classes of the schema, as protobuf makes them."""
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")
    of = descriptor_pb2.FieldDescriptorProto
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            made = message.field.add(name=field, number=number, label=of.LABEL_OPTIONAL)
            if kind in SCHEMA:
                made.type, made.type_name, made.label = of.TYPE_MESSAGE, kind, of.LABEL_REPEATED
            elif kind == "REPEATED":
                made.type, made.label = of.TYPE_UINT64, of.LABEL_REPEATED
            else:
                made.type = getattr(of, f"TYPE_{kind}")
            if name == "AttributeProto" and field != "name":
                made.oneof_index = 0
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"et.{name}"))
        for name in SCHEMA
    }


CLASSES = classes()


def messages(data: bytes) -> Iterator[bytes]:
    """The parts of a file, each of which follows its length."""
    place = 0
    while place < len(data):
        length = shift = 0
        while True:
            byte = data[place]
            place, length, shift = place + 1, length | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        assert place + length <= len(data), "the file ends within a message"
        yield data[place : place + length]
        place += length


def read(tasks: Sequence[Task]) -> list[Any]:
    """The nodes of a rank's file.  Fails if protobuf would not write the same bytes."""
    first, *others = messages(b"".join(chakra.trace(tasks)))
    assert CLASSES["GlobalMetadata"].FromString(first).version == "0.0.4"
    nodes = [CLASSES["Node"].FromString(data) for data in others]
    for data, node in zip(others, nodes, strict=True):
        assert node.SerializeToString() == data
    return nodes


def attributes(node: Any) -> dict[str, int]:
    return {attr.name: getattr(attr, attr.WhichOneof("value")) for attr in node.attr}


def sent(ranks: Sequence[Sequence[Any]]) -> dict[tuple[int, int], list[int]]:
    """The sizes of the messages from rank to rank; fails at one without end, or at a circle."""
    ends: dict[int, dict[tuple[int, int, int], int]] = {5: {}, 6: {}}
    for rank, nodes in enumerate(ranks):
        order = TopologicalSorter({node.id: node.data_deps for node in nodes})
        assert set(order.static_order()) == {node.id for node in nodes}
        for node in nodes:
            values = attributes(node)
            assert values["is_cpu_op"] == 0
            if node.type in ends:
                pair = (rank, values["comm_dst"]) if node.type == 5 else (values["comm_src"], rank)
                ends[node.type][*pair, values["comm_tag"]] = values["comm_size"]
    assert ends[5] == ends[6], "sends and receives differ"
    sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (source, destination, _), size in ends[5].items():
        sizes[source, destination].append(size)
    return sizes


@pytest.mark.parametrize("collective", calls.COLLECTIVES)
def test_messages_are_received_and_have_the_predicted_bytes(collective: str) -> None:
    for call in calls.calls(collective):
        tasks = call.tasks(calls.MACHINE)
        num_empty = sum(task.kind == "send" and not task.size for task in chain(*tasks))
        summed = calls.summed(sent([read(of_rank) for of_rank in tasks]))
        expected = calls.predicted(call)
        assert {ends: pair[0] for ends, pair in summed.items()} == {
            ends: pair[0] for ends, pair in expected.items()
        }
        total = sum(pair[1] for pair in expected.values())
        assert sum(pair[1] for pair in summed.values()) == total + num_empty, call


def test_nodes_are_those_of_the_tasks() -> None:
    tasks = Call("all_reduce", 4, 4 << 20, "ring").tasks(calls.MACHINE)[0]
    nodes = read(tasks)
    assert [tuple(node.data_deps) for node in nodes] == [task.after for task in tasks]
    work = [node.duration_micros for node in nodes if node.type == 4]
    assert work[:2] == [0, 1049]  # 100 ns of the call; 524288 bytes combined at 2 ns each
    assert {node.name for node in nodes[1:3]} == {"receive1", "send2"}


def test_the_reader_finds_a_missing_receive_a_circle_and_a_cut_file() -> None:
    tasks = Call("all_reduce", 4, 400, "ring").tasks(calls.MACHINE)
    ranks = [read(of_rank) for of_rank in tasks]
    with pytest.raises(AssertionError, match="sends and receives differ"):
        sent([*ranks[:3], [node for node in ranks[3] if node.type != 6 and not node.data_deps]])
    with pytest.raises(CycleError):
        sent([read([tasks[0][0]._replace(after=(0,))])])
    with pytest.raises(AssertionError, match="ends within"):
        list(messages(b"".join(chakra.trace(tasks[0]))[:-1]))
