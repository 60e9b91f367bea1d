"""L0: what a platform says of its devices is complete, typed, stable, and within the contract."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

import pytest

from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.constraint_solver import owned_constraints, solve
from cardan.core.interfaces.capabilities import (
    Capabilities,
    Determinism,
    DeviceInfo,
    GraphSupport,
)
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.kernels import Provider
from cardan.core.interfaces.platform import Platform, Role
from cardan.core.types.kv import DTYPE_BYTES
from cardan.core.types.model import ModelSummary
from cardan.testing.conformance.results import not_supported

LEVEL = "L0"

_COMPUTE_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SLEEP_LEVELS = (1, 2)
_WORDS: dict[str, tuple[str, ...]] = {
    "graphs": get_args(GraphSupport),
    "determinism": get_args(Determinism),
}


@pytest.fixture
def present(cardan_platform: Platform) -> Platform:
    """The platform, on a machine that has its device."""
    probe = cardan_platform.probe()
    if probe.state != "present":
        not_supported(f"facts need a device, the platform is {probe.state}: {probe.reason}")
    return cardan_platform


def test_devices_are_well_formed(present: Platform) -> None:
    """Devices have the platform's name, distinct indices, a name, an arch and plain details."""
    devices = tuple(present.devices())
    assert devices, "probe() says present, devices() lists none"
    indices = [info.index for info in devices]
    assert len(set(indices)) == len(indices), f"indices repeat: {indices}"
    for info in devices:
        assert isinstance(info, DeviceInfo), f"devices() lists {info!r}"
        assert info.platform == present.name, f"platform {info.platform!r} in {info}"
        assert type(info.index) is int, f"index must be an int from 0: {info.index!r}"
        assert info.index >= 0, f"index must be an int from 0: {info.index!r}"
        for name in ("name", "arch"):
            value = getattr(info, name)
            assert isinstance(value, str), f"{name} must be a string, got {value!r}"
            assert value, f"{name} of device {info.index} is empty"
        assert info.memory_bytes is None or _is_count(info.memory_bytes, 1), (
            f"memory_bytes must be positive or None, got {info.memory_bytes!r}"
        )
        _check_words(info.details, "details")


def test_devices_are_stable(present: Platform) -> None:
    """Asked again, by another instance too, devices() lists the same indices in the same order."""
    first = [(info.index, info.name, info.arch) for info in present.devices()]
    again = [(info.index, info.name, info.arch) for info in present.devices()]
    other = [(info.index, info.name, info.arch) for info in type(present)().devices()]
    assert first == again, f"first {first}, then {again}"
    assert first == other, f"first {first}, another instance {other}"


def test_capabilities_are_well_formed(present: Platform) -> None:
    """Every capability of every device has a value of its documented set."""
    for info in present.devices():
        found = present.capabilities(info)
        assert isinstance(found, Capabilities), f"capabilities() returned {found!r}"
        _check_capabilities(found)
        assert found == present.capabilities(info), "capabilities change from call to call"


def test_shapes_are_well_formed(present: Platform) -> None:
    """Buckets are sorted, distinct and positive; a strict policy has buckets of tokens and rows."""
    for info in present.devices():
        found = present.shapes(_model(present, info), info)
        assert isinstance(found, ShapePolicy), f"shapes() returned {found!r}"
        for name in ("token_buckets", "sequence_buckets", "kv_len_buckets"):
            buckets = getattr(found, name)
            assert isinstance(buckets, tuple), f"{name} must be a tuple, got {buckets!r}"
            assert all(_is_count(size, 1) for size in buckets), (
                f"{name} are not positive: {buckets}"
            )
            assert list(buckets) == sorted(set(buckets)), f"{name} are not ascending: {buckets}"
        if found.strict:
            assert found.token_buckets, "strict without token_buckets"
            assert found.sequence_buckets, "strict without sequence_buckets"
        if present.capabilities(info).static_shapes:
            assert found.strict, "static_shapes is declared, the shape policy is not strict"


def test_constraints_are_solvable(present: Platform) -> None:
    """Constraints name settings that exist, state reasons, and contradict no default."""
    config = EngineConfig(model=ModelConfig(model="demo"))
    for info in present.devices():
        found = present.constrain(config, info)
        owned = owned_constraints(found, f"platform {present.name}")
        solve(config, owned).config.check()
        silent = [wish.path for wish in owned if not wish.reason.strip()]
        assert not silent, f"constraints without a reason: {', '.join(silent)}"
        assert list(found) == list(present.constrain(config, info)), "constraints change"


@pytest.mark.parametrize("role", get_args(Role))
def test_child_environment_is_plain(present: Platform, role: Role) -> None:
    """child_env() maps names of environment variables to strings, for any role."""
    devices = tuple(present.devices())
    for chosen in (devices, devices[:1], ()):
        found = present.child_env(role, chosen)
        _check_words(found, f"child_env({role!r})")
        assert not [name for name in found if not name or "=" in name or "\0" in name], found


def test_providers_are_well_formed(present: Platform) -> None:
    """Providers serve operations of the catalogue, in its versions, under names of their own."""
    for info in present.devices():
        found = tuple(present.kernels(info))
        if not found:
            not_supported("the platform has no kernel providers, operations run as defined")
        # Brings torch, which a platform without kernels may lack.
        from cardan.core.ops.catalogue import CATALOGUE

        versions = {op.name: op.version for op in CATALOGUE}
        names = [(item.op, item.name) for item in found if isinstance(item, Provider)]
        assert len(names) == len(found), f"kernels() lists {found!r}"
        assert len(set(names)) == len(names), f"providers repeat: {names}"
        for item in found:
            assert item.op in versions, f"{item.name} serves {item.op}, which is no operation"
            assert item.version <= versions[item.op], (
                f"{item.name} is for version {item.version} of {item.op}, "
                f"which is at {versions[item.op]}"
            )
            module, _, function = item.load.partition(":")
            assert module, f"{item.name}: load {item.load!r} is not module:function"
            assert function, f"{item.name}: load {item.load!r} is not module:function"


def test_doctor_is_plain(present: Platform) -> None:
    """doctor() gives printable facts."""
    for info in present.devices():
        _check_words(present.doctor(info), "doctor()")


def _check_capabilities(found: Capabilities) -> None:
    for item in fields(found):
        value, default = getattr(found, item.name), getattr(Capabilities(), item.name)
        assert type(value) is type(default), (
            f"{item.name} must be a {type(default).__name__}, got {value!r}"
        )
    assert found.dtypes, "dtypes is empty"
    _check_among("dtypes", found.dtypes, _COMPUTE_DTYPES)
    assert found.float64 or "float64" not in found.dtypes, "computes in float64 without float64"
    _check_among("kv_dtypes", found.kv_dtypes, tuple(DTYPE_BYTES))
    _check_among("sleep_levels", found.sleep_levels, _SLEEP_LEVELS)
    assert all(isinstance(name, str) for name in found.instruction_sets), found.instruction_sets
    for name, words in _WORDS.items():
        _check_among(name, (getattr(found, name),), words)
    assert found.async_depth >= 0, f"async_depth must be at least 0, got {found.async_depth}"
    assert found.max_query_tokens >= 1, (
        f"max_query_tokens must be at least 1, got {found.max_query_tokens}"
    )


def _check_among(name: str, values: Sequence[Any], known: Sequence[Any]) -> None:
    for value in values:
        assert value in known, f"{name}: {value!r} is none of {', '.join(map(str, known))}"
    assert len(set(values)) == len(values), f"{name} repeat: {values}"


def _check_words(found: Mapping[str, str], what: str) -> None:
    assert isinstance(found, Mapping), f"{what} must be a mapping, got {found!r}"
    for name, value in found.items():
        assert isinstance(name, str), f"{what}: name {name!r} is no string"
        assert isinstance(value, str), f"{what}: {name} must be a string, got {value!r}"


def _is_count(value: object, low: int) -> bool:
    return type(value) is int and value >= low


def _model(platform: Platform, info: DeviceInfo) -> ModelSummary:
    return ModelSummary(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        num_layers=2,
        max_model_len=256,
        dtype=platform.capabilities(info).dtypes[0],
    )
