"""An attention backend of the CPU under test: its batches, and what they must give."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cardan.core.interfaces.attention import AttentionBackend
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.platforms.cpu.native.attention import NativeAttention
from cardan.platforms.cpu.numba.attention import NumbaAttention
from cardan.testing.conformance.attention_truth import error_text
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement

DEVICE = DeviceInfo(platform="cpu", index=0, name="test", arch="test")
# Rows of few lines and of many, prompts, chunks with context, rows of several items, and one
# without tokens.
MIXED = [
    *((1, 1), (1, 9), (5, 5), (3, 17), (1, 300), (8, 8), (70, 200)),
    *((0, 7), (2, 2), (1, 64), (1, 65)),
]


@dataclass(frozen=True)
class AttentionProvider:
    """``tolerance``: of outputs, by the queries' dtype."""

    backend: type[AttentionBackend]
    tolerance: Mapping[str, float]

    @property
    def layout(self):
        return self.backend.layout(Geometry().spec, DEVICE)

    def build(self, geometry):
        """Planning and running need no open device."""
        return self.backend(geometry.spec, self.layout, None)

    def make(self, geometry, rows, seed=1, **placement):
        return PagedBatch(
            geometry, rows, seed, Placement(layout=self.layout, order=seed, **placement)
        )

    def check(self, batch, layer, factor=1):
        """``factor``: of the tolerance, where scores are large or rounded once more."""
        geometry = batch.geometry
        lse = torch.full((batch.batch.num_tokens, geometry.heads), -7.0)
        with torch.inference_mode():
            out = batch.run(self.build(geometry), layer, lse)
        assert out.dtype == geometry.torch_dtype
        want, want_lse = batch.truth(layer)
        assert not error_text(out, want, self.tolerance[geometry.dtype] * factor)
        # Sums are float32 whatever the inputs are.
        assert not error_text(lse[: len(want_lse)], want_lse, 4e-6 * factor)
        assert (lse[len(want_lse) :] == -7.0).all()


NATIVE = AttentionProvider(NativeAttention, {"float32": 2e-6, "bfloat16": 6e-3, "float16": 8e-4})
NUMBA = AttentionProvider(NumbaAttention, {"float32": 3e-6, "bfloat16": 6e-3, "float16": 8e-4})
