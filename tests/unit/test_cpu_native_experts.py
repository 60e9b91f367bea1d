"""Native kernels for mixtures of experts: the float64 definitions, bits, captured work, errors."""

import os
from functools import cache, partial

import pytest
import torch

from cardan.core.interfaces.kernels import Case
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import compare_case
from cardan.platforms.cpu.graph import capture_graph
from cardan.platforms.cpu.graph_memory import GraphMemory
from cardan.platforms.cpu.native.experts import ExpertKernels
from cardan.platforms.cpu.native.library import library, open_library, unavailable_reason

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no native kernels: {unavailable_reason()}"
)
OPS = {op.name: op for op in CATALOGUE}
DTYPES = ("float32", "bfloat16", "float16")


@cache
def kernels(isa):
    wanted = {} if isa == "best" else {"CARDAN_CPU_ISA": isa}
    return ExpertKernels(open_library({**os.environ, **wanted}))


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ["best", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_prepared", [True, False])
def test_agrees_with_definition(dtype, isa, is_prepared):
    own = kernels(isa)
    for name, prepare in (("route_experts", None), ("expert_mlp", own.prepare_experts)):
        op = OPS[name]
        prepare = prepare if is_prepared else None
        for case in op.make_inputs(getattr(torch, dtype), torch.device("cpu"), 1):
            found = compare_case(op, getattr(own, name), case, OPS, op.tolerances[dtype], prepare)
            assert found.ok, f"{name} {case.attributes}: {found}"


def mixture(tokens, dtype, seed=0, num_experts=12, top_k=4, hidden=72, inner=40):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator)
    x, experts = draw(tokens, hidden), draw(num_experts, 3 * hidden * inner) * 0.1
    own = kernels("best")
    ids, weights = own.route_experts(draw(tokens, num_experts), top_k, True)
    prepared = own.prepare_experts(experts.to(dtype), hidden, inner)
    return x.to(dtype), prepared, ids, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype):
    x, experts, ids, weights = mixture(90, dtype)
    run = kernels("best").expert_mlp
    together = run(x, experts, ids, weights)
    for rows in (slice(0, 1), slice(7, 30), slice(88, 90)):
        assert torch.equal(run(x[rows], experts, ids[rows], weights[rows]), together[rows])
    torch.set_num_threads(1)
    assert torch.equal(run(x, experts, ids, weights), together)


def test_routing_of_what_is_no_number():
    """NaN goes first, as in a descending sort; ids stay in range."""
    logits = torch.tensor([[0.0, torch.nan, 3.0, torch.inf], [-torch.inf] * 4])
    ids, weights = kernels("best").route_experts(logits, 2, True)
    assert ids.tolist() == [[1, 3], [0, 1]]
    assert weights.isnan().all()


def test_captured_work_follows_the_routing():
    """A replay goes to the experts of its own inputs."""
    own = ExpertKernels(library())
    x, experts, ids, weights = mixture(3, torch.float32)
    results = []
    graph = capture_graph(
        library(), lambda: results.append(own.expert_mlp(x, experts, ids, weights)), GraphMemory()
    )
    assert graph.num_torch_calls == 0
    other_x, _, other_ids, other_weights = mixture(3, torch.float32, seed=5)
    for ours, theirs in ((x, other_x), (ids, other_ids), (weights, other_weights)):
        ours.copy_(theirs)
    graph.replay()
    assert torch.equal(results[0], own.expert_mlp(x, experts, ids, weights))


def test_no_rows():
    x, experts, ids, weights = mixture(0, torch.float32)
    assert kernels("best").expert_mlp(x, experts, ids, weights).shape == (0, 72)


def test_bad_arguments_are_named():
    own = kernels("best")
    x, experts, ids, weights = mixture(2, torch.float32)
    ids[1, 2] = 12
    with pytest.raises(IndexError, match=r"expert_ids must lie in \[0, 12\).* to 12"):
        own.expert_mlp(x, experts, ids, weights)
    with pytest.raises(ValueError, match=r"x must be torch\.float32 \[T, 72\]"):
        own.expert_mlp(x.bfloat16(), experts, ids, weights)
    with pytest.raises(ValueError, match=r"experts must be \[E, 24\] .* got \[2, 25\]"):
        own.prepare_experts(torch.zeros(2, 25), 4, 2)
    with pytest.raises(ValueError, match="top_k must be 1 to 3"):
        own.route_experts(torch.zeros(1, 3), 4, True)


def test_definition_cannot_be_captured():
    """It looks at the routing, which a replay could not follow."""
    from cardan.core.interfaces.errors import UnsupportedError

    op = OPS["expert_mlp"]
    [case, *_] = op.make_inputs(torch.float32, torch.device("cpu"), 0)
    assert isinstance(case, Case)
    with pytest.raises(UnsupportedError, match="reads what the device computed"):
        capture_graph(library(), lambda: op.body(*case.args), GraphMemory())
