"""Inputs of operations in the sizes of a small model's step, which level L6 measures with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Case
from cardan.core.ops.reference.block_inputs import random_blocks
from cardan.testing.conformance.op_cases import OpBench
from cardan.testing.conformance.speed import Work

_HIDDEN = 2048
_HEADS, _KV_HEADS, _HEAD_DIM, _POSITIONS = 16, 4, 128, 1024
# Rows of a step that decodes, and of one that reads a prompt.
_DECODE, _PREFILL = 8, 256
_EPS = 1e-6
# They read some rows of a table, not all of it.
_GATHERS = frozenset({"embedding", "block_embedding"})


@dataclass(frozen=True, slots=True)
class SpeedCase:
    """Inputs on the host, the operations of products in them, and the factors' dtype."""

    case: Case
    flop: int
    dtype: str


_Make = Callable[[torch.dtype, torch.Generator], Sequence[SpeedCase]]


def speed_cases(bench: OpBench) -> list[SpeedCase]:
    """Sizes of a step, or where there are none of this operation, or the provider refuses them,
    the largest of the inputs that it is tested with."""
    generator = torch.Generator().manual_seed(0)
    make = _MAKERS.get(bench.use.op)
    made = make(getattr(torch, bench.use.dtype), generator) if make else ()
    taken = [item for item in made if bench.takes(item.case)]
    if taken:
        return taken
    cases = bench.cases(0)
    return [SpeedCase(max(cases, key=_num_bytes), 0, bench.use.dtype)] if cases else []


def work_of(bench: OpBench, item: SpeedCase, outputs: Sequence[Tensor]) -> Work:
    """``outputs``: all that the call writes."""
    written = sum(tensor.nbytes for tensor in outputs)
    read = written if bench.use.op in _GATHERS else _num_bytes(item.case)
    return Work(num_bytes=read + written, flop=item.flop, dtype=item.dtype)


def _num_bytes(case: Case) -> int:
    return sum(value.nbytes for value in case.args if isinstance(value, Tensor))


def _linear(dtype: torch.dtype, generator: torch.Generator) -> list[SpeedCase]:
    weight = _draw(dtype, generator, _HIDDEN, _HIDDEN) * _HIDDEN**-0.5
    sizes = {"in_features": _HIDDEN, "out_features": _HIDDEN}
    return [
        _case((_draw(dtype, generator, rows, _HIDDEN), weight, None), dtype, sizes, rows)
        for rows in (_DECODE, _PREFILL)
    ]


def _block_linear(dtype: torch.dtype, generator: torch.Generator) -> list[SpeedCase]:
    cases = []
    for format in ("q4_k", "q8_0"):
        weight = random_blocks(format, _HIDDEN, _HIDDEN, _HIDDEN**-0.5, generator)
        sizes = {"format": format, "in_features": _HIDDEN, "out_features": _HIDDEN}
        x = _draw(dtype, generator, _DECODE, _HIDDEN)
        made = _case((x, weight, None, format), dtype, sizes, _DECODE)
        cases.append(SpeedCase(made.case, made.flop, "int8"))
    return cases


def _rms_norm(dtype: torch.dtype, generator: torch.Generator) -> list[SpeedCase]:
    x, weight = _draw(dtype, generator, _PREFILL, _HIDDEN), _draw(dtype, generator, _HIDDEN)
    return [_case((x, weight, _EPS), dtype, {"hidden": _HIDDEN})]


def _fused_add_rms_norm(dtype: torch.dtype, generator: torch.Generator) -> list[SpeedCase]:
    x, residual = (_draw(dtype, generator, _PREFILL, _HIDDEN) for _ in range(2))
    weight = _draw(dtype, generator, _HIDDEN)
    return [_case((x, residual, weight, _EPS), dtype, {"hidden": _HIDDEN})]


def _gated(dtype: torch.dtype, generator: torch.Generator) -> list[SpeedCase]:
    x = _draw(dtype, generator, _PREFILL, 2 * _HIDDEN)
    return [_case((x,), dtype, {"hidden": _HIDDEN})]


def _rotary(dtype: torch.dtype, generator: torch.Generator) -> list[SpeedCase]:
    queries = _draw(dtype, generator, _PREFILL, _HEADS, _HEAD_DIM)
    keys = _draw(dtype, generator, _PREFILL, _KV_HEADS, _HEAD_DIM)
    angles = torch.rand(_POSITIONS, _HEAD_DIM // 2, generator=generator) * 6.3
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    args = (queries, keys, table, torch.arange(_PREFILL))
    return [_case(args, dtype, {"head_dim": _HEAD_DIM})]


_MAKERS: Mapping[str, _Make] = {
    "linear": _linear,
    "block_linear": _block_linear,
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "silu_and_mul": _gated,
    "gelu_tanh_and_mul": _gated,
    "rotary_embedding": _rotary,
}


def _case(
    args: tuple[Any, ...], dtype: torch.dtype, sizes: Mapping[str, Any], product_rows: int = 0
) -> SpeedCase:
    name = str(dtype).removeprefix("torch.")
    case = Case(args, {"dtype": name, **sizes})
    return SpeedCase(case, 2 * product_rows * _HIDDEN * _HIDDEN, name)


def _draw(dtype: torch.dtype, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)
