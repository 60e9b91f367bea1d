"""Attention backends on a device, called as the engine calls them."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cardan.core.interfaces.attention import (
    AttentionBackend,
    AttentionNeed,
    BatchView,
    KVLayout,
    LayerParams,
)
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.platform import Platform
from cardan.core.ops.reference.attention import ReferenceAttention
from cardan.core.types.model import ModelSummary
from cardan.testing.conformance.attention_truth import LSE_TOLERANCE, TOLERANCE, error_text
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement, Row

# Sizes to try until a backend takes one, common ones first.
_SIZES = [(dim, block) for dim in (64, 128, 32, 16) for block in (16, 32, 64, 128, 8, 256)]


def backends_of(platform: Platform, info: DeviceInfo) -> list[type[AttentionBackend]]:
    """The platform's backends and the core's own."""
    return [*platform.attention(info), ReferenceAttention]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase:
    """A layer's sizes and what its ``LayerParams`` use."""

    geometry: Geometry
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    lse: bool = False

    @property
    def need(self) -> AttentionNeed:
        windows = frozenset() if self.window is None else frozenset({self.window})
        return replace(
            self.geometry.need,
            windows=self.geometry.need.windows | windows,
            softcap=self.softcap is not None,
            sinks=self.sinks,
            alibi=self.alibi,
            lse=self.lse,
        )

    def layer(self, device: torch.device, rng: np.random.Generator) -> LayerParams:
        """Parameters with random sinks and slopes, float32 on the device."""
        heads = self.geometry.heads
        sinks = torch.from_numpy(rng.standard_normal(heads)).float().to(device)
        slopes = torch.from_numpy(rng.uniform(0.01, 0.6, heads)).float().to(device)
        return LayerParams(
            scale=self.geometry.k_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            sinks=sinks if self.sinks else None,
            alibi_slopes=slopes if self.alibi else None,
        )


class AttentionBench:
    """Makes batches for one backend class on one device, and judges its answers."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        platform: Platform,
        device: Device,
        torch_device: torch.device,
    ) -> None:
        self.backend = backend
        self.device = device
        self.torch_device = torch_device
        self._platform = platform

    def accepts(self, need: AttentionNeed) -> Verdict:
        return self.backend.accepts(need, self.device.info)

    def usual_geometry(self) -> Geometry | Verdict:
        """Sizes that the backend takes, grouped heads; else why it takes none of those tried."""
        dtype = self.device.capabilities.dtypes[0]
        verdict = Verdict()
        for dim, block_size in _SIZES:
            geometry = Geometry(
                heads=4, kv_heads=2, k_dim=dim, v_dim=dim, block_size=block_size, dtype=dtype
            )
            verdict = self.accepts(geometry.need)
            if verdict:
                return geometry
        return verdict

    def placement(self, geometry: Geometry, **changes: Any) -> Placement:
        """On the device, in the backend's layout and, where shapes are strict, in its buckets."""
        layout = self.backend.layout(geometry.spec, self.device.info)
        values = {"layout": layout, "shapes": self._shapes(geometry), **changes}
        return Placement(torch_device=self.torch_device, **values)

    def build(self, geometry: Geometry, layout: KVLayout) -> AttentionBackend:
        return self.backend(geometry.spec, layout, self.device)

    def run(
        self, batch: PagedBatch, layer: LayerParams, lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step on a new backend; output and log-sum-exp of the rows' tokens, on the host."""
        backend = self.build(batch.geometry, batch.placement.layout)
        sums = self.lse_buffer(batch.batch, batch.geometry) if lse else None
        with self.device.inference():
            out = batch.run(backend, layer, sums)
        self.device.synchronize()
        count = batch.num_query_tokens
        return out.cpu(), None if sums is None else sums[:count].cpu()

    def fault(self, batch: PagedBatch, layer: LayerParams, lse: bool = False) -> str:
        """What is wrong with the answer to ``batch``, empty if nothing."""
        out, sums = self.run(batch, layer, lse)
        dtype = batch.geometry.dtype
        if out.dtype != batch.geometry.torch_dtype:
            return f"the output is {out.dtype} instead of {batch.geometry.torch_dtype}"
        want, want_sums = batch.truth(layer)
        text = error_text(out, want, TOLERANCE[dtype])
        if text or sums is None:
            return text
        text = error_text(sums, want_sums, LSE_TOLERANCE[dtype])
        return text and f"log-sum-exp: {text}"

    def lse_buffer(self, batch: BatchView, geometry: Geometry) -> torch.Tensor:
        shape = (batch.num_tokens, geometry.heads)
        return torch.full(shape, -7.0, dtype=torch.float32, device=self.torch_device)

    def _shapes(self, geometry: Geometry) -> ShapePolicy:
        summary = ModelSummary(
            architecture="LlamaForCausalLM",
            vocab_size=512,
            hidden_size=geometry.heads * geometry.k_dim,
            num_layers=2,
            max_model_len=1024,
            dtype=geometry.dtype,
            config={
                "num_attention_heads": geometry.heads,
                "num_key_value_heads": geometry.kv_heads,
                "head_dim": geometry.k_dim,
            },
        )
        shapes = self._platform.shapes(summary, self.device.info)
        return shapes if shapes.strict else ShapePolicy()


def mixed_rows(rng: np.random.Generator, block_size: int, count: int = 8) -> list[Row]:
    """A ragged step: decode rows, whole prompts, chunks with context, lone tokens, a long row."""
    rows: list[Row] = [(1, 1), (1, 5 * block_size + 3), (block_size, block_size)]
    for _ in range(count - len(rows)):
        length = int(rng.integers(1, 3 * block_size + 2))
        rows.append((int(rng.choice([1, length, int(rng.integers(1, length + 1))])), length))
    return [rows[place] for place in rng.permutation(len(rows))]


def decode_rows(rng: np.random.Generator, block_size: int, count: int = 6) -> list[Row]:
    return [(1, int(length)) for length in rng.integers(1, 4 * block_size, size=count)]
