"""An attention backend that serves nobody with heads of 128."""

from typing import TYPE_CHECKING, Any, ClassVar

from cardan.core.interfaces.attention import (
    AttentionBackend,
    AttentionNeed,
    BatchView,
    KVLayout,
    LayerParams,
)
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.types.kv import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from cardan.core.interfaces.device import Device


class AcmeAttention(AttentionBackend):
    name: ClassVar[str] = "acme.rocket"

    @classmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        return Verdict.no(f"k_head_dim {need.k_head_dim} exceeds 64")

    @classmethod
    def layout(cls, spec: KVCacheSpec, device: DeviceInfo) -> KVLayout:
        return KVLayout()

    def __init__(self, spec: KVCacheSpec, layout: KVLayout, device: "Device") -> None:
        raise NotImplementedError

    def plan(self, batch: BatchView) -> Any:
        raise NotImplementedError

    def write(self, k: "torch.Tensor", v: "torch.Tensor", cache: "torch.Tensor", plan: Any) -> None:
        raise NotImplementedError

    def run(
        self,
        q: "torch.Tensor",
        cache: "torch.Tensor",
        plan: Any,
        layer: LayerParams,
        lse: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        raise NotImplementedError
