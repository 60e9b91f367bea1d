"""Mixtures of experts: a router, and the stacked weights of gated MLPs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from cardan.core.interfaces.model import BuildContext, WeightSlot
from cardan.core.interfaces.torch_linear import DenseLinear
from cardan.models.layers.decoder_config import ExpertsConfig
from cardan.models.layers.linear import dtype_name
from cardan.models.layers.sharding import even_span


class ExpertMixture(nn.Module):
    """x [T, hidden_size] -> [T, hidden_size]: the weighted sum of the experts that the router
    chooses for each token.

    The router is the same on every rank; of each expert a rank holds an equal share of the
    intermediate features, as of a dense MLP, and the sums are added up over the ranks once. Both
    are kept in the model's dtype, whatever the quantisation scheme.
    """

    def __init__(
        self, prefix: str, hidden_size: int, config: ExpertsConfig, build: BuildContext
    ) -> None:
        super().__init__()
        prefix = f"{prefix}{config.names.mixture}."
        dtype = dtype_name(build.dtype)
        self.router = DenseLinear(
            build.ops, hidden_size, config.num_experts, build.dtype, build.device
        )
        self.experts = ExpertWeights(f"{prefix}experts.", hidden_size, config, build)
        self._route = build.ops.bind(
            "route_experts", dtype=dtype, num_experts=config.num_experts, top_k=config.top_k
        )
        self._mix = build.ops.bind("expert_mlp", **self.experts.attributes)
        self._config = config
        self._router_slot = WeightSlot(
            f"{prefix}gate.weight", (config.num_experts, hidden_size), self._load_router
        )
        self._communicator = build.communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router.apply(x, None)
        ids, weights = self._route(logits, self._config.top_k, self._config.renormalize)
        out: torch.Tensor = self._mix(x, self.experts.stacked, ids, weights)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield self._router_slot
        yield from self.experts.weight_slots()

    def finish_loading(self) -> None:
        """Called once after every slot was loaded."""
        self.router.finish()

    def _load_router(self, weight: torch.Tensor) -> None:
        self.router.load(0, weight)


class ExpertWeights:
    """One rank's share of a layer's experts, in one tensor as ``expert_mlp`` takes it.

    ``prefix`` is that of the experts' names (``model.layers.0.mlp.experts.``). Memory is taken when
    the first tensor is loaded, and brought into the kernel's form with the last, so that of one
    layer at a time both forms are there.
    """

    def __init__(
        self, prefix: str, hidden_size: int, config: ExpertsConfig, build: BuildContext
    ) -> None:
        total = config.intermediate_size
        self._columns = even_span(config.size_key, total, build.rank, build.world_size)
        self._prefix = prefix
        self._hidden = hidden_size
        self._config = config
        self._build = build
        self.attributes: dict[str, int | float | str | bool] = {
            "dtype": dtype_name(build.dtype),
            "num_experts": config.num_experts,
            "top_k": config.top_k,
            "hidden": hidden_size,
            "intermediate": self._columns.size,
        }
        # None until the first tensor comes, [num_experts, 3 * intermediate * hidden] until the
        # last one, then whatever form the kernel takes.
        self.stacked: Any = None
        self._num_missing = 3 * config.num_experts

    def weight_slots(self) -> Iterator[WeightSlot]:
        names, total = self._config.names, self._config.intermediate_size
        wide, tall = (total, self._hidden), (self._hidden, total)
        for expert in range(self._config.num_experts):
            projections = ((names.gate, wide), (names.up, wide), (names.down, tall))
            for index, (name, shape) in enumerate(projections):
                slot = f"{self._prefix}{expert}.{name}.weight"
                yield WeightSlot(slot, shape, self._loader(expert, index))

    def _loader(self, expert: int, index: int) -> Callable[[torch.Tensor], None]:
        """Takes the gate (0), up (1) or down (2) projection of an expert."""
        start, stop = self._columns.start, self._columns.stop

        def load(whole: torch.Tensor) -> None:
            own = whole[:, start:stop] if index == 2 else whole[start:stop]
            size = self._columns.size * self._hidden
            place = self._tensor()[expert, index * size : (index + 1) * size]
            place.view(own.shape).copy_(own)
            self._num_missing -= 1
            if not self._num_missing:
                self.stacked = self._build.ops.prepare(
                    "expert_mlp", self.stacked, **self.attributes
                )

        return load

    def _tensor(self) -> torch.Tensor:
        if self.stacked is None:
            self.stacked = torch.empty(
                (self._config.num_experts, 3 * self._columns.size * self._hidden),
                dtype=self._build.dtype,
                device=self._build.device,
            )
        found: torch.Tensor = self.stacked
        return found
