"""A linear layer whose rows are in quantised blocks, of one format or of several."""

from collections.abc import Callable, Sequence

import torch

from cardan.core.interfaces.quantization import LinearMethod, StoredBlocks
from cardan.core.interfaces.torch_linear import DenseLinear
from cardan.plugins.quantization.layer import Layer

_Apply = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
# Rows as they were loaded: in blocks, or in full precision.
_Part = StoredBlocks | torch.Tensor


class BlockLinear(LinearMethod):
    """Keeps the parts that it is given, and packs them as soon as the last row is there.

    Neighbouring parts of one format become one product; parts in full precision become products
    of the operation ``linear``. What was packed no longer holds what it was loaded from, unless
    the kernel takes blocks as they are stored.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._parts: dict[int, _Part] = {}
        # Rows and their product, in the order of the rows; empty until all were loaded.
        self.products: list[tuple[int, _Apply]] = []

    def load(self, row: int, weight: torch.Tensor) -> None:
        self.add(row, weight)

    def add(self, row: int, part: _Part) -> None:
        """Take rows from ``row`` on."""
        self._parts[row] = part
        if sum(map(_num_rows, self._parts.values())) == self._layer.out_features:
            self._pack()

    def finish(self) -> None:
        if self._parts:
            raise RuntimeError(
                f"{sum(map(_num_rows, self._parts.values()))} of {self._layer.out_features} rows "
                "were loaded"
            )

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(self.products) == 1:
            return self.products[0][1](x, bias)
        outputs = []
        row = 0
        for num_rows, product in self.products:
            own_bias = None if bias is None else bias[row : row + num_rows]
            outputs.append(product(x, own_bias))
            row += num_rows
        return torch.cat(outputs, dim=-1)

    def _pack(self) -> None:
        parts = [part for _, part in sorted(self._parts.items())]
        self._parts.clear()
        self.products = [
            (sum(map(_num_rows, group)), self._product(group)) for group in self._groups(parts)
        ]

    def _groups(self, parts: Sequence[_Part]) -> list[list[_Part]]:
        """Parts that one product can serve."""
        groups: list[list[_Part]] = []
        for part in parts:
            if groups and self._can_join(groups[-1], part):
                groups[-1].append(part)
            else:
                groups.append([part])
        return groups

    def _can_join(self, group: Sequence[_Part], part: _Part) -> bool:
        last = group[-1]
        if not isinstance(last, StoredBlocks) or not isinstance(part, StoredBlocks):
            return isinstance(last, torch.Tensor) and isinstance(part, torch.Tensor)
        if last.format != part.format:
            return False
        num_rows = sum(map(_num_rows, group))
        # Together they must be served as well as they are apart.
        has_kernel = self._layer.has_kernel
        return has_kernel(part.format, num_rows + part.num_rows) or not has_kernel(
            part.format, num_rows
        )

    def _product(self, group: Sequence[_Part]) -> _Apply:
        blocks = [part for part in group if isinstance(part, StoredBlocks)]
        if blocks:
            return self._block_product(blocks)
        return self._dense_product([part for part in group if isinstance(part, torch.Tensor)])

    def _block_product(self, parts: Sequence[StoredBlocks]) -> _Apply:
        layer, format = self._layer, parts[0].format
        data = parts[0].data if len(parts) == 1 else torch.cat([part.data for part in parts])
        use = layer.use(format, data.shape[0])
        data = data.contiguous().to(layer.device)
        weight = layer.ops.prepare("block_linear", data, **use)
        run = layer.ops.bind("block_linear", **use)

        def product(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out: torch.Tensor = run(x, weight, bias, format)
            return out

        return product

    def _dense_product(self, parts: Sequence[torch.Tensor]) -> _Apply:
        layer = self._layer
        num_rows = sum(map(_num_rows, parts))
        dense = DenseLinear(layer.ops, layer.in_features, num_rows, layer.torch_dtype, layer.device)
        row = 0
        for part in parts:
            dense.load(row, part)
            row += part.shape[0]
        dense.finish()
        return dense.apply


def _num_rows(part: _Part) -> int:
    return int(part.num_rows if isinstance(part, StoredBlocks) else part.shape[0])
