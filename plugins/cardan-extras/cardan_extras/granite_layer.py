"""The parts of a Granite layer, each bound to its kernels when it is made."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from cardan.core.interfaces.attention import HeadRotation, LayerParams
from cardan.core.interfaces.model import BuildContext, StepContext, WeightSlot
from cardan.core.interfaces.quantization import LinearMethod, StoredBlocks
from cardan.core.interfaces.torch_linear import DenseLinear


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


class Linear:
    """One matrix of several tensors of the checkpoint: ``rows`` has their names and heights.

    ``name`` is what quantisation schemes know it by. The scheme or the contract's own storage
    keeps the weight; the bias is kept here.
    """

    def __init__(
        self, name: str, width: int, rows: Mapping[str, int], bias: bool, build: BuildContext
    ) -> None:
        height, scheme = sum(rows.values()), build.quantization
        if scheme is not None and scheme.accepts(name, width, height):
            dtype = dtype_name(build.dtype)
            method = scheme.linear(build.ops, name, width, height, dtype, build.device)
        else:
            method = DenseLinear(build.ops, width, height, build.dtype, build.device)
        self.method: LinearMethod = method
        self._width = width
        self._rows = rows
        self._bias: Tensor | None = None
        if bias:
            self._bias = torch.empty(height, dtype=build.dtype, device=build.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.method.apply(x, self._bias)

    def weight_slots(self) -> Iterator[WeightSlot]:
        row = 0
        for name, height in self._rows.items():
            yield WeightSlot(
                f"{name}.weight",
                (height, self._width),
                self._weight_loader(row),
                load_stored=self._blocks_loader(row),
            )
            if self._bias is not None:
                own = self._bias[row : row + height]
                yield WeightSlot(f"{name}.bias", (height,), _copier(own))
            row += height

    def finish_loading(self) -> None:
        self.method.finish()

    def _weight_loader(self, row: int) -> Callable[[Tensor], None]:
        return lambda weight: self.method.load(row, weight)

    def _blocks_loader(self, row: int) -> Callable[[StoredBlocks], bool]:
        return lambda blocks: self.method.load_stored(row, blocks)


def _copier(own: Tensor) -> Callable[[Tensor], None]:
    def load(whole: Tensor) -> None:
        own.copy_(whole)

    return load


class Norm:
    """Root-mean-square norm with a weight [hidden]."""

    def __init__(self, name: str, hidden: int, eps: float, build: BuildContext) -> None:
        self._name = name
        self._eps = eps
        self._weight = torch.empty(hidden, dtype=build.dtype, device=build.device)
        dtype = dtype_name(build.dtype)
        self._norm = build.ops.bind("rms_norm", dtype=dtype, hidden=hidden)
        self._add_and_norm = build.ops.bind("fused_add_rms_norm", dtype=dtype, hidden=hidden)

    def __call__(self, x: Tensor) -> Tensor:
        normed: Tensor = self._norm(x, self._weight, self._eps)
        return normed

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x added to the residual: its norm, and the sum."""
        found: tuple[Tensor, Tensor] = self._add_and_norm(x, residual, self._weight, self._eps)
        return found

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{self._name}.weight", tuple(self._weight.shape), _copier(self._weight))


class Attention:
    """x [T, hidden] -> [T, hidden]. ``heads``: of queries, of keys, and their size."""

    def __init__(
        self,
        index: int,
        hidden: int,
        heads: tuple[int, int, int],
        form: tuple[float, bool, Tensor],
        build: BuildContext,
    ) -> None:
        """``form``: scale of the scores, whether there are biases, the rotary table."""
        num_heads, num_kv_heads, head_dim = heads
        scale, bias, table = form
        prefix = f"model.layers.{index}.self_attn."
        rows = {
            f"{prefix}q_proj": num_heads * head_dim,
            f"{prefix}k_proj": num_kv_heads * head_dim,
            f"{prefix}v_proj": num_kv_heads * head_dim,
        }
        self._qkv = Linear(f"{prefix}qkv_proj", hidden, rows, bias, build)
        name = f"{prefix}o_proj"
        self._out = Linear(name, num_heads * head_dim, {name: hidden}, bias, build)
        self._index = index
        self._heads = heads
        self._params = LayerParams(scale=scale)
        self._rotation = _rotation(head_dim, table, build)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        num_heads, num_kv_heads, head_dim = self._heads
        qkv = self._qkv(x).unflatten(-1, (num_heads + 2 * num_kv_heads, head_dim))
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=-2)
        attended = step.attend(self._index, q, k, v, self._params, self._rotation)
        return self._out(attended.flatten(-2))

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self._qkv.weight_slots()
        yield from self._out.weight_slots()

    def finish_loading(self) -> None:
        self._qkv.finish_loading()
        self._out.finish_loading()


def _rotation(head_dim: int, table: Tensor, build: BuildContext) -> HeadRotation:
    dtype = dtype_name(build.dtype)
    rotate = build.ops.bind("rotary_embedding", dtype=dtype, head_dim=head_dim)

    def rotated(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = rotate(q, k, table, positions)
        return found

    served = build.ops.resolve("rotary_embedding", dtype=dtype, head_dim=head_dim)
    return HeadRotation(rotate=rotated, provider=served.provider, cos_sin=table)


class Mlp:
    """x [T, hidden] -> [T, hidden], through ``sizes[1]`` gated features."""

    def __init__(self, index: int, sizes: tuple[int, int], bias: bool, build: BuildContext) -> None:
        hidden, inner = sizes
        prefix = f"model.layers.{index}.mlp."
        rows = {f"{prefix}gate_proj": inner, f"{prefix}up_proj": inner}
        self._gate_up = Linear(f"{prefix}gate_up_proj", hidden, rows, bias, build)
        name = f"{prefix}down_proj"
        self._down = Linear(name, inner, {name: hidden}, bias, build)
        self._act = build.ops.bind("silu_and_mul", dtype=dtype_name(build.dtype), hidden=inner)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._act(self._gate_up(x)))

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self._gate_up.weight_slots()
        yield from self._down.weight_slots()

    def finish_loading(self) -> None:
        self._gate_up.finish_loading()
        self._down.finish_loading()
