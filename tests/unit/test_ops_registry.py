"""Who serves an operation: order, pins, refusals, self-checks, and the explanation of it all."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import ops_fixtures
import pytest
import torch

from cardan.core.interfaces.errors import ConfigError, PluginError
from cardan.core.interfaces.kernels import Needs, OpSpec, Provider, Tolerance
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.registry import KernelRegistry
from cardan.core.ops.self_check import LoadedKernel, self_check

USE = {"dtype": "float32", "hidden": 64}


def provider(function, name=None, op="rms_norm", **fields):
    return Provider(
        op=op, name=name or f"test.{function}", load=f"ops_fixtures:{function}", **fields
    )


def registry(*providers, ops=CATALOGUE, features=(), **settings):
    return KernelRegistry(ops, providers, device=torch.device("cpu"), features=features, **settings)


def chosen(table, op="rms_norm", **use):
    table.bind(op, **(use or USE))
    return next(item for item in table.explain() if item.op == op)


GOOD = provider("good_rms_norm")


def test_provider_serves_and_is_bound_once():
    table = registry(GOOD)
    kernel = table.bind("rms_norm", **USE)
    assert kernel is ops_fixtures.good_rms_norm
    assert table.bind("rms_norm", hidden=64, dtype="float32") is kernel
    (resolution,) = table.explain()
    assert resolution.provider == "test.good_rms_norm"
    assert resolution.self_check.startswith("passed: 3 cases")
    table.bind("rms_norm", dtype="bfloat16", hidden=64)
    assert len(table.explain()) == 2


def test_reference_serves_without_providers():
    resolution = chosen(registry())
    assert (resolution.provider, resolution.rejected) == ("reference", ())


def test_packages_as_given_then_priority_within_one():
    first = provider("good_rms_norm", "alpha.slow")
    second = provider("good_rms_norm", "alpha.fast", priority=5)
    other = provider("good_rms_norm", "beta.fastest", priority=9)
    assert chosen(registry(first, second, other)).provider == "alpha.fast"
    assert chosen(registry(other, first, second)).provider == "beta.fastest"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (provider("good_rms_norm", "test.bad", version=2), "version 2"),
        (provider("good_rms_norm", "test.bad", needs=Needs(features=frozenset({"x9"}))), "x9"),
        (provider("good_rms_norm", "test.bad", needs=Needs(multiple_of={"hidden": 48})), "48"),
        (provider("good_rms_norm", "test.bad", needs=Needs(modules=("nosuch",))), "nosuch"),
        (provider("good_rms_norm", "test.bad", needs=Needs(dtypes=frozenset({"int8"}))), "int8"),
        (provider("absent", "test.bad"), "not a function"),
        (provider("not_a_function", "test.bad"), "not a function"),
        (provider("renamed_rms_norm", "test.bad"), "(x, gamma, eps)"),
        (provider("demanding_rms_norm", "test.bad"), "*, stream"),
        (provider("wrong_rms_norm", "test.bad"), "x the tolerance at output 0["),
        (provider("wide_rms_norm", "test.bad"), "is torch.float64 instead of torch.float32"),
        (provider("raising_rms_norm", "test.bad"), "RuntimeError: no such engine"),
        (provider("nan_rms_norm", "test.bad"), "nan instead of"),
        (Provider(op="rms_norm", name="test.bad", load="no_such_module:f"), "import of no_such"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_state_reasons_and_the_next_serves(bad, reason):
    resolution = chosen(registry(bad, GOOD))
    assert resolution.provider == "test.good_rms_norm"
    (rejection,) = resolution.rejected
    assert rejection.provider == "test.bad"
    assert reason in "; ".join(rejection.reasons)
    with pytest.raises(ConfigError, match=r"pins rms_norm to test\.bad") as error:
        registry(bad, GOOD, pins=["rms_norm=test.bad"]).bind("rms_norm", **USE)
    assert reason in str(error.value)


def test_optional_keyword_parameters_are_welcome():
    assert chosen(registry(provider("optional_rms_norm"))).provider == "test.optional_rms_norm"


def test_pins_and_vetoes():
    first, second = provider("good_rms_norm", "a.one"), provider("good_rms_norm", "b.two")
    assert chosen(registry(first, second)).provider == "a.one"
    assert chosen(registry(first, second, pins=["rms_norm=b.two"])).provider == "b.two"
    assert chosen(registry(first, second, pins=["rms_norm=reference"])).provider == "reference"
    assert chosen(registry(first, second, pins=["-a.one"])).provider == "b.two"
    resolution = chosen(registry(first, second, pins=["-rms_norm"]))
    assert resolution.provider == "reference"
    assert "vetoed" in resolution.rejected[0].reasons[0]


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("rms_nrom=a.one", "did you mean rms_norm"),
        ("rms_norm=a.on", "did you mean a.one"),
        ("-rms_nom", "did you mean rms_norm"),
        ("-a.ome", "did you mean a.one"),
        ("linear=a.one", "there are: reference"),
        ("rms_norm", "neither op=provider"),
    ],
)
def test_unknown_pins_suggest_the_nearest(pin, message):
    with pytest.raises(ConfigError, match=message):
        registry(provider("good_rms_norm", "a.one"), pins=[pin])


def test_contradicting_pins():
    providers = provider("good_rms_norm", "a.one"), provider("good_rms_norm", "b.two")
    with pytest.raises(ConfigError, match=r"to a\.one and to b\.two"):
        registry(*providers, pins=["rms_norm=a.one", "rms_norm=b.two"])


def test_failed_check_warns_once_and_strict_raises(caplog):
    bad = provider("wrong_rms_norm")
    table = registry(bad, GOOD)
    with caplog.at_level(logging.WARNING, "cardan"):
        table.bind("rms_norm", **USE)
        table.bind("rms_norm", dtype="float32", hidden=128)
    assert len(caplog.records) == 1
    assert "seed" in caplog.text
    with pytest.raises(PluginError, match="strict_kernels"):
        registry(bad, strict=True).bind("rms_norm", **USE)


def test_a_check_passes_for_one_dtype_and_fails_for_another():
    loose = {"bfloat16": Tolerance(atol=100.0, rtol=1.0)}
    table = registry(provider("wrong_rms_norm", tolerances=loose))
    assert chosen(table, dtype="bfloat16", hidden=64).provider == "test.wrong_rms_norm"
    assert chosen(registry(provider("wrong_rms_norm", tolerances=loose))).provider == "reference"


def test_uncheckable_provider_says_so():
    narrow = provider("good_rms_norm", needs=Needs(equals={"hidden": 8192}))
    resolution = chosen(registry(narrow), dtype="float32", hidden=8192)
    assert resolution.provider == "test.good_rms_norm"
    assert resolution.self_check.startswith("unchecked: no test input")


def test_composite_uses_bound_parts_or_the_whole():
    table = registry(GOOD)
    resolution = chosen(table, "fused_add_rms_norm")
    assert resolution.provider == "reference"
    assert [item.op for item in table.explain()] == ["rms_norm", "fused_add_rms_norm"]
    assert table.explain()[0].provider == "test.good_rms_norm"
    kernel = table.bind("fused_add_rms_norm", **USE)
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    normed, total = kernel(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, ops_fixtures.good_rms_norm(x + residual, weight, 1e-6))
    whole = provider("good_fused_add_rms_norm", op="fused_add_rms_norm")
    table = registry(GOOD, whole)
    assert chosen(table, "fused_add_rms_norm").provider == "test.good_fused_add_rms_norm"
    assert len(table.explain()) == 1
    takes_parts = provider("parts_fused_add_rms_norm", op="fused_add_rms_norm")
    assert "signature" in chosen(registry(takes_parts), "fused_add_rms_norm").rejected[0].reasons[0]


def test_unknown_operation_dtype_and_provider(caplog):
    table = registry()
    with pytest.raises(KeyError, match="did you mean rms_norm"):
        table.bind("rmsnorm", **USE)
    with pytest.raises(ConfigError, match="needs dtype"):
        table.bind("rms_norm", hidden=64)
    with caplog.at_level(logging.WARNING, "cardan"):
        registry(provider("good_rms_norm", op="rms_nrm"))
    assert "did you mean rms_norm" in caplog.text


def test_duplicates_and_missing_parts_are_errors():
    with pytest.raises(PluginError, match="two kernel providers named"):
        registry(GOOD, GOOD)
    norm = next(op for op in CATALOGUE if op.name == "rms_norm")
    fused = next(op for op in CATALOGUE if op.name == "fused_add_rms_norm")
    with pytest.raises(PluginError, match="two operations are named rms_norm"):
        registry(ops=[norm, norm])
    with pytest.raises(PluginError, match="unknown part rms_norm"):
        registry(ops=[fused])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_table_lists_every_operation(dtype):
    rows = registry(GOOD).table(dtype)
    assert [row.op for row in rows] == [op.name for op in CATALOGUE]
    assert {row.op: row.provider for row in rows}["rms_norm"] == "test.good_rms_norm"


def test_a_check_leaves_the_random_state_alone():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    registry(GOOD).table("float32")
    assert torch.equal(before, torch.random.get_rng_state())


def test_mutated_arguments_are_compared():
    def double_in_place(x):
        x.mul_(2)

    op = OpSpec(
        name="double",
        body=double_in_place,
        version=1,
        tolerances={"float32": Tolerance(0.0, 0.0)},
        make_inputs=next(o for o in CATALOGUE if o.name == "silu_and_mul").make_inputs,
        mutates=(0,),
    )
    lazy = Provider(op="double", name="test.lazy", load="test_ops_registry:do_nothing")
    assert "tolerance" in chosen(registry(lazy, ops=[op]), "double").rejected[0].reasons[0]


def do_nothing(x):
    """A kernel that forgets its work."""


def test_what_says_that_it_is_not_supported_is_passed_over_quietly(caplog):
    absent = Provider(
        op="rms_norm", name="test.absent", load="unsupported_kernels:rms_norm", priority=3
    )
    with caplog.at_level(logging.INFO):
        resolution = chosen(registry(absent, GOOD, strict=True))
    assert resolution.provider == "test.good_rms_norm"
    assert [(item.provider, item.reasons) for item in resolution.rejected] == [
        ("test.absent", ("there is no compiler",))
    ]
    assert not caplog.records


def test_checks_run_with_the_device_as_the_current_one(monkeypatch):
    """Kernels that are not torch's are launched there, wherever their tensors are."""
    current = []

    class Current:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *exc):
            current.pop()

    seen = []

    def make_inputs(dtype, device, seed):
        seen.extend(current)
        return []

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(device=Current))
    op = replace(CATALOGUE[0], make_inputs=make_inputs)
    provider = Provider(op=op.name, name="a.b", load="x:y")
    device = torch.device("meta", 1)
    self_check(op, provider, LoadedKernel(op.body), "float32", {}, device, ())
    assert (seen, current) == ([device], [])
