"""Selection: a named algorithm runs or is refused, and the default can always run."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import pytest

import collectives
from collectives import Operator, Topology, algorithms, using
from collectives.arrays.operators import operator
from collectives.schedule.contracts import SPECS
from collectives.selection import preferred, select
from collectives.selection.labels import parse_label

REDUCTIONS = [name for name, spec in SPECS.items() if spec.is_reduction]
NUM_BYTES = [0, 8, 2**15, 2**15 + 1, 2**20, 2**40]
MATMUL = Operator.from_function(lambda left, right: left @ right, name="matmul")


@pytest.mark.parametrize("collective", algorithms.collectives())
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 33])
def test_there_is_a_default_for_every_size(collective: str, size: int) -> None:
    for num_bytes in NUM_BYTES:
        assert select.choose(collective, None, size, num_bytes, None).algorithm.serves(size)


@pytest.mark.parametrize("collective", REDUCTIONS)
@pytest.mark.parametrize("size", range(1, 34))
def test_there_is_an_ordered_default_for_every_size(collective: str, size: int) -> None:
    for num_bytes in NUM_BYTES:
        choice = select.choose(collective, None, size, num_bytes, MATMUL)
        assert choice.algorithm.is_ordered and choice.algorithm.serves(size)


SHAPES = [(4, 1), (4, 2), (3, 3), (16, 8)]  # hosts, ranks per host


def on(shape: tuple[int, int]) -> Topology:
    return Topology.consecutive(shape[0] * shape[1], shape[1])


@pytest.mark.parametrize("collective", algorithms.collectives())
@pytest.mark.parametrize("shape", SHAPES)
def test_there_is_a_default_for_all_hosts(collective: str, shape: tuple[int, int]) -> None:
    hosts = on(shape)
    for num_bytes, op in product(NUM_BYTES, [None, MATMUL] if collective in REDUCTIONS else [None]):
        choice = select.choose(collective, None, hosts.size, num_bytes, op, topology=hosts)
        assert choice.algorithm.serves(hosts.size)
        assert op is None or choice.algorithm.is_ordered


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_defaults_for_large_vectors_send_the_least_between_hosts(shape: tuple[int, int]) -> None:
    hosts, (num_hosts, per_host) = on(shape), shape
    n = 2**20 * hosts.size
    others = n - n // num_hosts
    least = {
        "broadcast": n,
        "reduce": n,
        "all_reduce": 2 * others,
        "all_gather": others,
        "reduce_scatter": others,
        "all_to_all": per_host * others,
    }
    for collective, most in least.items():
        counts: Any = [n // hosts.size] * hosts.size
        counts = n if SPECS[collective].has_pieces else counts
        counts = [counts] * hosts.size if collective == "all_to_all" else counts
        sent = collectives.predict(collective, hosts.size, counts, topology=hosts).bytes
        by_host = sent.reshape(num_hosts, per_host, num_hosts, per_host).sum(axis=(1, 3))
        assert (by_host.sum(axis=1) - by_host.diagonal()).max() == most, collective
    natural = collectives.predict("all_reduce", hosts.size, n, algorithm="recursive_doubling")
    by_host = natural.bytes.reshape(num_hosts, per_host, num_hosts, per_host).sum(axis=(1, 3))
    assert by_host.sum() - by_host.trace() > num_hosts * least["all_reduce"]


@pytest.mark.parametrize("collective", algorithms.collectives())
def test_there_is_a_default_for_devices_and_it_has_no_segments(collective: str) -> None:
    ops = [None, MATMUL] if collective in REDUCTIONS else [None]
    for size, num_bytes, op in product([1, 2, 3, 4, 7, 8, 16, 33], [*NUM_BYTES, 2**23 + 1], ops):
        choice = select.choose(collective, None, size, num_bytes, op, on_device=True)
        assert choice.algorithm.serves(size) and (op is None or choice.algorithm.is_ordered)
        assert choice.segments == 1 and "segments" not in choice.algorithm.options
    sizes = [2**20, 2**26]
    host = [select.choose(collective, None, 8, num_bytes) for num_bytes in sizes]
    has_segments = [choice.segments > 1 or "segments" in choice.options for choice in host]
    assert any(has_segments) == (collective in {"broadcast", *REDUCTIONS}), "or nothing is tested"


def test_devices_of_several_hosts_run_what_is_chosen_for_the_host() -> None:
    for num_bytes in NUM_BYTES:
        call = "all_reduce", None, 8, num_bytes
        several = select.choose(*call, topology=on((4, 2)))
        assert select.choose(*call, topology=on((4, 2)), on_device=True) == several
        alone = select.choose(*call, topology=on((1, 8)), on_device=True)
        assert alone == select.choose(*call, on_device=True) != several


def test_a_named_algorithm_is_the_same_on_devices() -> None:
    for text in ("ring", "segmented_ring", "segmented_ring(segments=3)"):
        call = "all_reduce", text, 4, 2**24
        assert select.choose(*call, on_device=True) == select.choose(*call)


def test_the_reason_names_devices_and_the_sizes_of_the_rule() -> None:
    def reason(size: int, num_bytes: int) -> str:
        return select.choose("all_reduce", None, size, num_bytes, on_device=True).reason

    assert reason(4, 8) == "built-in rule for devices: up to 2097152 bytes"
    assert reason(4, 2**21 + 1) == "built-in rule for devices: above 2097152 bytes"
    assert reason(9, 2**18) == "built-in rule for devices: up to 262144 bytes"


def test_the_reason_names_the_hosts() -> None:
    def reason(num_bytes: int) -> str:
        return select.choose("all_reduce", None, 8, num_bytes, topology=on((4, 2))).reason

    assert reason(8) == "built-in rule on 4 hosts: up to 16384 bytes"
    assert reason(2**21) == "built-in rule on 4 hosts: above 1048576 bytes"


@pytest.mark.parametrize(
    ("collective", "alone"),
    [("all_reduce", "segmented_ring"), ("all_gather", "ring"), ("reduce_scatter", "ring")],
)
def test_large_vectors_go_around_a_ring_if_no_ranks_share_a_host(
    collective: str, alone: str
) -> None:
    for per_host, label in ((1, alone), (2, "hierarchical")):
        hosts = Topology.consecutive(8, per_host)
        assert select.choose(collective, None, 8, 2**24, topology=hosts).label == label


def test_a_named_algorithm_gets_the_hosts_that_are_not_given_with_it() -> None:
    def hosts(text: str, topology: Topology | None) -> object:
        return select.choose("all_reduce", text, 6, 8, topology=topology).options["per_host"]

    pairs = Topology.consecutive(6, 2)
    assert hosts("hierarchical", pairs) == pairs
    assert hosts("hierarchical", None) == Topology("aaaaaa")
    assert hosts("hierarchical(per_host=3)", pairs) == 3
    with pytest.raises(ValueError, match="a topology of 6 ranks does not fit 8 ranks"):
        select.choose("all_reduce", None, 8, 8, topology=pairs)


def test_an_operator_that_is_not_commutative_needs_an_ordered_algorithm() -> None:
    with pytest.raises(ValueError, match="needs a commutative operator; matmul is not"):
        select.choose("all_reduce", "ring", 4, 8, MATMUL)
    assert select.choose("all_reduce", "linear", 4, 8, MATMUL).label == "linear"
    commutative = operator("sum", "all_reduce")
    assert select.choose("all_reduce", None, 4, 2**30, commutative).label == "ring"
    assert select.choose("all_reduce", None, 4, 2**30, MATMUL).label == "two_shot"


def test_what_has_segments_gets_such_as_stay_in_cache() -> None:
    for collective, name, num_parts in [
        ("broadcast", "chain", 1),
        ("all_reduce", "double_binary_tree", 2),  # one for each tree
        ("all_reduce", "segmented_ring", 4),  # one for each rank
        ("all_gather", "all_broadcast", 4),
    ]:
        algorithm = algorithms.info(collective, name)
        assert select.options(algorithm, 4, 0) == {"segments": 1}
        n = 4 * num_parts * select.SEGMENT_BYTES
        assert select.options(algorithm, 4, n) == {"segments": 4}
        assert select.options(algorithm, 4, n + 1) == {"segments": 5}
        assert select.options(algorithm, 4, 2**40) == {"segments": 256}
    assert select.options(algorithms.info("broadcast", "binomial"), 4, 2**30) == {}
    assert select.options(algorithms.info("broadcast", "knomial"), 4, 2**30) == {}


def test_options_that_are_given_replace_those_that_would_be_chosen() -> None:
    def chosen(text: str) -> dict[str, int]:
        return select.choose("broadcast", text, 4, 2**20, None).options

    assert chosen("chain") == {"segments": 4}
    assert chosen("chain(segments=7)") == {"segments": 7}
    assert chosen("chain(chains=3)") == {"segments": 4, "chains": 3}


def test_no_more_segments_are_used_than_leave_none_empty() -> None:
    def segments(collective: str, text: str, num_bytes: int, itemsize: int = 1) -> Any:
        return select.choose(collective, text, 4, num_bytes, itemsize=itemsize).options["segments"]

    assert segments("broadcast", "pipeline(segments=9)", 80, 8) == 9
    assert segments("broadcast", "pipeline(segments=11)", 80, 8) == 10
    assert segments("broadcast", "pipeline(segments=11)", 80) == 11
    assert segments("all_reduce", "segmented_ring(segments=9)", 80, 8) == 3  # of 4 blocks
    assert segments("all_reduce", "segmented_ring(segments=9)", 0) == 1
    assert segments("all_gather", "all_broadcast(segments=99)", 80, 8) == 3  # 4 blocks
    assert segments("all_to_all", "segmented_linear(segments=99)", 80, 8) == 3
    with pytest.raises(ValueError, match="at least 1 byte"):
        segments("broadcast", "pipeline(segments=9)", 80, 0)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("bruck", "bruck"),
        (" bruck ( ) ", "bruck"),
        ("bruck(radix=4)", "bruck(radix=4)"),
        ("bruck( radix = 004 )", "bruck(radix=4)"),
    ],
)
def test_a_label_is_the_text_as_everybody_would_write_it(text: str, label: str) -> None:
    assert parse_label("all_gather", text).label == label


def test_options_are_named_in_the_order_of_the_algorithm() -> None:
    label = "chain(chains=3, segments=5)"
    assert parse_label("reduce", "chain(segments=5, chains=3)").label == label


@pytest.mark.parametrize(
    "text",
    ["", "()", "(radix=4)", "bruck(", "bruck)", "bruck(radix=4))", "bruck(radix=4)x", "bruck()()"]
    + [f"bruck({inside})" for inside in ("4", "radix", "radix=", "radix==4", "=4", "radix=4,", ",")]
    + ["bruck(radix=1e1)", "bruck(radix=2**3)", "bruck(radix=\u0664)", "bruck(radix=__import__)"],
)
def test_what_is_not_written_like_a_call_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a name|is not like 'segments=8'"):
        parse_label("all_gather", text)


@pytest.mark.parametrize("text", [" ", "rign", "rign(radix=4)", "bruck radix=4", "bruck, ring"])
def test_an_unknown_name_is_answered_with_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm .* for all_gather; known: ring, "):
        parse_label("all_gather", text)


def test_the_ranks_are_asked_for_with_the_options() -> None:
    assert select.check("all_to_all", "torus(x=3)", 9).options == {"x": 3}
    with pytest.raises(ValueError, match=r"torus\(x=4\) serves a multiple of x \* y"):
        select.check("all_to_all", "torus(x=4)", 6)


def test_the_reason_names_the_built_in_rule() -> None:
    def reason(collective: str, num_bytes: int, op: Operator | None = None) -> str:
        return select.choose(collective, None, 4, num_bytes, op).reason

    assert reason("all_reduce", 49152) == "built-in rule: up to 49152 bytes"
    middle = "built-in rule: above 49152 and up to 524288 bytes"
    assert reason("all_reduce", 49153) == middle
    assert reason("all_reduce", 524289) == "built-in rule: above 524288 bytes"
    assert reason("scan", 8) == "built-in rule: every size"
    assert select.choose("all_reduce", "ring", 4, 8).reason == "named by the caller"


def test_of_nested_blocks_the_inner_one_counts_for_what_it_names() -> None:
    with using(all_reduce="ring", all_gather=" bruck( radix = 4 )"):
        with using(all_reduce="linear"):
            assert preferred("all_reduce") == "linear"
            assert preferred("all_gather") == "bruck(radix=4)"
        assert preferred("all_reduce") == "ring"
        assert preferred("broadcast") is None
    assert preferred("all_reduce") is None


def test_a_block_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(RuntimeError, match="inside"), using(all_reduce="ring"):
        raise RuntimeError("inside")
    assert preferred("all_reduce") is None


def test_what_is_preferred_belongs_to_the_thread() -> None:
    names: list[str | None] = []
    with using(all_reduce="ring"):
        thread = threading.Thread(target=lambda: names.append(preferred("all_reduce")))
        thread.start()
        thread.join()
    assert names == [None]


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"allreduce": "ring"}, "unknown collective 'allreduce'"),
        ({"all_reduce": "rign"}, "unknown algorithm 'rign' for all_reduce"),
        ({"all_reduce": "ring", "all_gather": "bruck(radix=1)"}, "radix is at least 2"),
        ({"send": "point_to_point"}, "unknown collective 'send'"),
    ],
)
def test_what_cannot_be_preferred_is_refused_at_once(wanted: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence), using(**wanted):
        pytest.fail("the block was entered")
    assert preferred("all_reduce") is None


def test_only_a_text_can_be_preferred() -> None:
    with pytest.raises(TypeError, match="must be a name or None, not 3"), using(all_reduce=3):  # type: ignore[arg-type]
        pytest.fail("the block was entered")
