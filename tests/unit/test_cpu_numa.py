"""Which CPUs and memory nodes ranks get, on made-up machines; and the system's calls, here."""

import os
import platform
from dataclasses import replace

import pytest

from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import ConfigError
from cardan.platforms.cpu import placement as placements
from cardan.platforms.cpu.memory_policy import (
    INTERLEAVE,
    PREFERRED,
    MemoryPolicy,
    current_policy,
    policy_for,
    refusal,
    set_policy,
)
from cardan.platforms.cpu.numa import (
    cores_of,
    list_text,
    parse_list,
    plan_shares,
    read_nodes,
    usable_nodes,
)
from cardan.platforms.cpu.placement import (
    Placement,
    placement_facts,
    plan_placement,
    rank_details,
    rank_memory,
)

INFO = DeviceInfo(platform="cpu", index=0, name="test", arch="test")
needs_linux = pytest.mark.skipif(platform.system() != "Linux", reason="needs Linux")


@pytest.fixture
def machine(tmp_path):
    """Makes a file system: CPUs of each node as lists, and the siblings of cores."""

    def make(nodes, siblings=()):
        for node, cpus in nodes.items():
            folder = tmp_path / f"sys/devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(cpus + "\n")
        for group in siblings:
            for cpu in group:
                folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
                folder.mkdir(parents=True)
                text = ",".join(map(str, group))
                (folder / "thread_siblings_list").write_text(text + "\n")
        return tmp_path

    return make


def for_rank(rank, num_ranks):
    return replace(INFO, details={"rank": str(rank), "num_ranks": str(num_ranks)})


def test_nodes_are_those_with_cpus(machine):
    root = machine({0: "0-1,4", 2: "2-3,5-6", 1: "", 10: "7"})
    assert [(node.index, sorted(node.cpus)) for node in read_nodes(root)] == [
        (0, [0, 1, 4]),
        (2, [2, 3, 5, 6]),
        (10, [7]),
    ]
    assert usable_nodes(root, {1, 7}) == (0, 10)
    assert usable_nodes(root, {99}) == ()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((3,), "3"), ((0, 1, 2, 8), "0-2,8"), ((5, 0, 4, 2), "0,2,4-5")],
)
def test_lists_are_written_as_they_are_read(numbers, text):
    assert list_text(set(numbers)) == text
    assert parse_list(text) == set(numbers)


@pytest.mark.parametrize("text", ["", "x", "3-", "1-2-3", "-"])
def test_a_list_that_cannot_be_read_is_none(machine, text):
    assert read_nodes(machine({0: text})) == ()


def test_a_machine_that_says_nothing(tmp_path):
    assert read_nodes(tmp_path) == ()
    shares = plan_shares(tmp_path, {0, 1, 2, 3, 4}, 2)
    assert [sorted(share.cpus) for share in shares] == [[0, 1], [2, 3, 4]]
    assert all(share.nodes == () and share.is_exclusive for share in shares)


def test_siblings_stay_together(machine):
    root = machine({0: "0-7"}, [(0, 4), (1, 5), (2, 6), (3, 7)])
    assert cores_of(root, {0, 1, 4, 5, 7}) == [{0, 4}, {1, 5}, {7}]
    shares = plan_shares(root, range(8), 2)
    assert [sorted(share.cpus) for share in shares] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [share.num_cores for share in shares] == [2, 2]


@pytest.mark.parametrize(
    ("num_ranks", "cpus", "nodes"),
    [
        (1, [[0, 1, 2, 3, 4, 5, 6, 7]], [(0, 1)]),
        # Interleaved numbers: near CPUs, not consecutive ones.
        (2, [[0, 2, 4, 6], [1, 3, 5, 7]], [(0,), (1,)]),
        (4, [[0, 2], [4, 6], [1, 3], [5, 7]], [(0,), (0,), (1,), (1,)]),
        # No multiple: equal parts, one of them on both nodes.
        (3, [[0, 2], [1, 4, 6], [3, 5, 7]], [(0,), (0, 1), (1,)]),
    ],
)
def test_ranks_on_two_nodes(machine, num_ranks, cpus, nodes):
    root = machine({0: "0,2,4,6", 1: "1,3,5,7"})
    shares = plan_shares(root, range(8), num_ranks)
    assert [sorted(share.cpus) for share in shares] == cpus
    assert [share.nodes for share in shares] == nodes


def test_two_ranks_on_four_nodes(machine):
    root = machine({0: "0-1", 1: "2-3", 2: "4-5", 3: "6-7"})
    shares = plan_shares(root, range(8), 2)
    assert [share.nodes for share in shares] == [(0, 1), (2, 3)]


def test_what_affinity_leaves_of_the_nodes(machine):
    """Two ranks on a node that has one core left: equal parts are better than a rank without."""
    root = machine({0: "0-3", 1: "4-7"})
    shares = plan_shares(root, {0, 1, 2, 4}, 4)
    assert [sorted(share.cpus) for share in shares] == [[0], [1], [2], [4]]
    shares = plan_shares(root, {1, 2}, 2)
    assert [share.nodes for share in shares] == [(0,), (0,)]


def test_more_ranks_than_cores_share_all(machine):
    shares = plan_shares(machine({0: "0-1"}), {0, 1}, 3)
    assert all(share.cpus == {0, 1} and not share.is_exclusive for share in shares)


def test_every_cpu_is_shared_out_once(machine):
    root = machine({0: "0-9", 1: "10-21"}, [(cpu, cpu + 11) for cpu in range(11)])
    for num_ranks in range(1, 12):
        shares = plan_shares(root, range(22), num_ranks)
        assert sorted(cpu for share in shares for cpu in share.cpus) == list(range(22))
        counts = [share.num_cores for share in shares]
        assert sum(counts) == 11
        assert min(counts) > 0


def on_cpus(monkeypatch, cpus):
    monkeypatch.setattr(placements, "allowed_cpus", lambda: set(cpus))


def test_a_rank_is_bound_to_its_node(machine, monkeypatch):
    root = machine({0: "0-3", 1: "4-7"})
    on_cpus(monkeypatch, range(8))
    second = plan_placement(root, for_rank(1, 2), num_threads=8)
    assert second == Placement(1, 2, 4, frozenset(range(4, 8)), MemoryPolicy(PREFERRED, (1,)))
    # Fewer threads than cores, and a share that is on both nodes.
    first = plan_placement(root, for_rank(0, 1), num_threads=3)
    assert first == Placement(0, 1, 3, None, MemoryPolicy(INTERLEAVE, (0, 1)))
    middle = plan_placement(root, for_rank(1, 3), num_threads=3)
    assert middle.num_threads == 1
    assert middle.policy == MemoryPolicy(INTERLEAVE, (0, 1))


def test_a_rank_knows_cpus_that_it_did_not_inherit(machine, monkeypatch):
    root = machine({0: "0-3"})
    on_cpus(monkeypatch, {0, 1})  # as rank 0 was bound when it started this one
    info = for_rank(1, 2)
    info = replace(info, details={**info.details, "cpus": "0-3"})
    assert plan_placement(root, info, 4).cpus == {2, 3}
    assert rank_details() == {"ranks": "share", "cpus": "0-1"}


def test_one_node_needs_no_policy_and_warns_of_ranks(machine, monkeypatch, caplog):
    root = machine({0: "0-3"})
    on_cpus(monkeypatch, range(4))
    assert plan_placement(root, INFO, 4) == Placement(0, 1, 4)
    assert not caplog.records
    found = plan_placement(root, for_rank(0, 2), 4)
    assert found == Placement(0, 2, 2, frozenset({0, 1}))
    assert "threads of one process exchange less" in caplog.text
    caplog.clear()
    plan_placement(root, for_rank(1, 2), 4)
    assert not caplog.records  # once is enough


def test_too_many_ranks(machine, monkeypatch):
    root = machine({0: "0-1"})
    on_cpus(monkeypatch, range(2))
    with pytest.raises(ConfigError, match=r"size is 3.*there are 2; use at most 2, or raise"):
        plan_placement(root, for_rank(2, 3), 2)
    # What the user asks for is done, without binding anybody.
    found = plan_placement(root, for_rank(2, 3), 3)
    assert (found.num_threads, found.cpus) == (1, None)


def test_doctor_hints_at_ranks_where_there_are_nodes(machine, monkeypatch):
    root = machine({0: "0-3", 1: "4-7"})
    on_cpus(monkeypatch, range(4))
    assert placement_facts(root) == {}
    on_cpus(monkeypatch, range(8))
    monkeypatch.setattr(placements, "refusal", lambda: None)
    facts = placement_facts(root)
    assert "--tensor-parallel-size 2" in facts["memory nodes"]
    assert facts["pages"] == "placed by node"
    monkeypatch.setattr(placements, "refusal", lambda: "Operation not permitted")
    assert placement_facts(root)["pages"] == "placed by first touch: Operation not permitted"


def test_ranks_share_the_hosts_memory(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 1024 kB\n")
    found = rank_memory(tmp_path, 4)
    assert (found.total, found.free, found.exact) == (1 << 20, 1 << 18, False)


@needs_linux
def test_the_systems_policy_can_be_set_and_undone():
    if refusal() is not None:
        pytest.skip(f"the system refuses: {refusal()}")
    before = current_policy()
    node = read_nodes(placements.Path("/"))[0].index
    try:
        for policy in (policy_for([node]), MemoryPolicy(INTERLEAVE, (node,))):
            set_policy(policy)
            assert current_policy() == policy
    finally:
        set_policy(before)
    assert current_policy() == before


@needs_linux
def test_what_the_system_has_not_is_refused():
    for node in (1000, 5000, -1):
        with pytest.raises(OSError, match=r"Invalid argument|not between|not permitted"):
            set_policy(MemoryPolicy(PREFERRED, (node,)))


@needs_linux
def test_a_binding_is_undone():
    before = os.sched_getaffinity(0)
    cpus = frozenset({min(before)})
    binding = Placement(0, 2, 1, cpus, MemoryPolicy(PREFERRED, (1000,))).bind()
    try:
        assert os.sched_getaffinity(0) == cpus
    finally:
        binding.release()
    assert os.sched_getaffinity(0) == before
    binding.release()
    assert os.sched_getaffinity(0) == before


@needs_linux
def test_cpus_that_are_not_there_bind_nobody():
    before = os.sched_getaffinity(0)
    binding = Placement(0, 2, 1, frozenset({1023})).bind()
    assert os.sched_getaffinity(0) == before
    binding.release()
    assert os.sched_getaffinity(0) == before
