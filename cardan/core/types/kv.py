"""KV cache as plain data: what a layer needs, how layers share block tables, how many blocks."""

from dataclasses import dataclass
from typing import Literal

KVKind = Literal["full", "sliding_window", "mla", "recurrent"]

# Block 0 of each pool belongs to nobody: padding tokens (slot -1) may be written there.
NULL_BLOCK = 0

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
}

# Dtypes that every platform keeps a cache in, whatever it computes in.
KV_DTYPES = ("float32", "bfloat16", "float16", "int8")
# Bytes of the scale of each token and head, of keys and of values apart, by dtype of the cache.
SCALE_BYTES: dict[str, int] = {"int8": 4}


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The state that one layer keeps for each token (or, recurrent, for each sequence).

    ``k_head_dim`` and ``v_head_dim`` are elements; MLA has one head, its latent in ``k_head_dim``
    and ``v_head_dim`` 0. ``scale_bytes``: of the quantisation scales that lie behind the content
    of each token and head, of keys and of values apart (``SCALE_BYTES``; the form is described in
    ``cardan.core.interfaces.torch_kv_content``). A ``sliding_window`` layer needs only the last
    ``window`` tokens.
    """

    kind: KVKind
    block_size: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: str
    window: int | None = None
    scale_bytes: int = 0

    @property
    def content_size(self) -> int:
        """Elements that hold the keys, or the values, of one token and head.

        The larger of the head dims, so that both lie in equal places. Scales are counted in
        elements, and what lies before them is padded to a multiple of their size.
        """
        content = max(self.k_head_dim, self.v_head_dim)
        if not self.scale_bytes:
            return content
        num_bytes = content * DTYPE_BYTES[self.dtype]
        scales_end = (-(-num_bytes // self.scale_bytes) + 1) * self.scale_bytes
        return scales_end // DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        # A latent cache (no values) has one place for each token and head.
        places = 2 if self.v_head_dim else 1
        return self.num_kv_heads * places * self.content_size * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table because they keep and drop the same tokens."""

    layers: tuple[int, ...]
    spec: KVCacheSpec

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block id over all layers of the group."""
        return len(self.layers) * self.spec.bytes_per_block


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The pools to allocate. ``num_blocks`` counts for each group, the null block included."""

    groups: tuple[KVCacheGroup, ...]
    num_blocks: int

    @property
    def block_size(self) -> int:
        return self.groups[0].spec.block_size

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the cache."""
        return self.num_usable_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * sum(group.bytes_per_block for group in self.groups)
