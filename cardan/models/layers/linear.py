"""Linear layers, sharded over ranks; fused projections are loaded span by span.

Weight slots take whole checkpoint tensors and keep this rank's part of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cardan.core.interfaces.model import BuildContext, WeightSlot
from cardan.core.interfaces.quantization import LinearMethod, StoredBlocks
from cardan.core.interfaces.torch_linear import DenseLinear
from cardan.models.layers.sharding import Span, even_span, kv_head_span


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter without gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def linear_method(
    layer: str,
    in_features: int,
    out_features: int,
    build: BuildContext,
    *,
    float32_results: bool = False,
) -> LinearMethod:
    """Storage for one rank's part of ``layer``: the scheme's, if there is one that takes it.

    ``float32_results``: its ``apply_float32`` will be asked.
    """
    scheme = build.quantization
    if scheme is None or not scheme.accepts(layer, in_features, out_features):
        facts = (build.ops, in_features, out_features, build.dtype, build.device)
        return DenseLinear(*facts, float32_results=float32_results)
    dtype = dtype_name(build.dtype)
    return scheme.linear(build.ops, layer, in_features, out_features, dtype, build.device)


class Linear(nn.Module):
    """One rank's part of a linear layer. ``method`` owns the weight, the layer owns the bias."""

    def __init__(
        self, layer: str, in_features: int, out_features: int, bias: bool, build: BuildContext
    ) -> None:
        super().__init__()
        self.method = linear_method(layer, in_features, out_features, build)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = frozen(torch.empty(out_features, dtype=build.dtype, device=build.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return self.method.apply(x, self.bias)

    def finish_loading(self) -> None:
        """Called once after every slot was loaded."""
        self.method.finish()


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor of a column-parallel layer.

    ``rows`` of its ``total_rows`` belong to this rank; they lie from ``row`` on in the layer.
    """

    name: str
    total_rows: int
    rows: Span
    row: int


class ColumnLinear(Linear):
    """Output features are shared out among the ranks; the output is this rank's part.

    ``pieces`` are the checkpoint tensors that make up the layer, in order of their rows.
    """

    def __init__(
        self, layer: str, pieces: Sequence[Piece], in_features: int, bias: bool, build: BuildContext
    ) -> None:
        rows = sum(piece.rows.size for piece in pieces)
        super().__init__(layer, in_features, rows, bias, build)
        self._pieces = tuple(pieces)
        self._in_features = in_features

    def weight_slots(self) -> Iterator[WeightSlot]:
        for piece in self._pieces:
            shape = (piece.total_rows, self._in_features)
            yield WeightSlot(
                f"{piece.name}.weight",
                shape,
                self._weight_loader(piece),
                load_stored=self._blocks_loader(piece),
            )
            if self.bias is not None:
                loader = self._bias_loader(self.bias, piece)
                yield WeightSlot(f"{piece.name}.bias", (piece.total_rows,), loader)

    def _weight_loader(self, piece: Piece) -> Callable[[torch.Tensor], None]:
        rows = piece.rows
        return lambda weight: self.method.load(piece.row, weight[rows.start : rows.stop])

    def _blocks_loader(self, piece: Piece) -> Callable[[StoredBlocks], bool]:
        rows = piece.rows
        return lambda blocks: self.method.load_stored(piece.row, blocks.rows(rows.start, rows.stop))

    @staticmethod
    def _bias_loader(bias: nn.Parameter, piece: Piece) -> Callable[[torch.Tensor], None]:
        rows, own = piece.rows, bias[piece.row : piece.row + piece.rows.size]

        def load(whole: torch.Tensor) -> None:
            own.copy_(whole[rows.start : rows.stop])

        return load


class QKVLinear(ColumnLinear):
    """The fused query, key and value projections of ``prefix`` (``model.layers.0.self_attn.``).

    ``num_heads`` and ``num_kv_heads`` are those of this rank. Key-value heads are replicated where
    there are fewer of them than ranks.
    """

    num_heads: int
    num_kv_heads: int

    def __init__(
        self,
        prefix: str,
        hidden_size: int,
        head_dim: int,
        heads: tuple[int, int],
        bias: bool,
        build: BuildContext,
    ) -> None:
        total_heads, total_kv_heads = heads
        q = even_span("num_attention_heads", total_heads, build.rank, build.world_size)
        kv = kv_head_span(total_kv_heads, build.rank, build.world_size)
        pieces: list[Piece] = []
        row = 0
        for name, total, span in (
            ("q_proj", total_heads, q),
            ("k_proj", total_kv_heads, kv),
            ("v_proj", total_kv_heads, kv),
        ):
            rows = Span(span.start * head_dim, span.size * head_dim)
            pieces.append(Piece(f"{prefix}{name}", total * head_dim, rows, row))
            row += rows.size
        super().__init__(f"{prefix}qkv_proj", pieces, hidden_size, bias, build)
        self.num_heads, self.num_kv_heads = q.size, kv.size


class GateUpLinear(ColumnLinear):
    """The fused gate and up projections of ``prefix`` (``model.layers.0.mlp.``).

    ``intermediate_size`` is this rank's.
    """

    intermediate_size: int

    def __init__(
        self, prefix: str, hidden_size: int, intermediate_size: int, bias: bool, build: BuildContext
    ) -> None:
        span = even_span("intermediate_size", intermediate_size, build.rank, build.world_size)
        pieces = [
            Piece(f"{prefix}gate_proj", intermediate_size, span, 0),
            Piece(f"{prefix}up_proj", intermediate_size, span, span.size),
        ]
        super().__init__(f"{prefix}gate_up_proj", pieces, hidden_size, bias, build)
        self.intermediate_size = span.size


class RowLinear(Linear):
    """Input features are shared out among the ranks; the output is whole on every rank."""

    def __init__(
        self, layer: str, in_features: int, out_features: int, bias: bool, build: BuildContext
    ) -> None:
        columns = even_span(f"{layer} inputs", in_features, build.rank, build.world_size)
        super().__init__(layer, columns.size, out_features, bias, build)
        self._columns = columns
        # The sum over ranks must hold the bias once.
        self._adds_bias = build.rank == 0
        self._communicator = build.communicator
        self._layer = layer
        self._shape = (out_features, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., this rank's in_features] -> [..., out_features], summed over ranks."""
        out = self.method.apply(x, self.bias if self._adds_bias else None)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(
            f"{self._layer}.weight", self._shape, self._load_weight, load_stored=self._load_blocks
        )
        if self.bias is not None:
            yield WeightSlot(f"{self._layer}.bias", self._shape[:1], self._load_bias)

    def _load_weight(self, whole: torch.Tensor) -> None:
        self.method.load(0, whole[:, self._columns.start : self._columns.stop])

    def _load_blocks(self, whole: StoredBlocks) -> bool:
        own = whole.columns(self._columns.start, self._columns.stop)
        return own is not None and self.method.load_stored(0, own)

    def _load_bias(self, whole: torch.Tensor) -> None:
        if self.bias is not None:
            self.bias.copy_(whole)
