"""How much memory the KV cache gets and how it is cut."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of the KV cache.

    None leaves a setting open: the platform may choose, else the engine does
    (``cardan.core.config.fallbacks``).

    Attributes:
        block_size: tokens in a block.
        kv_cache_memory_bytes: bytes of all KV pools together; None: ``memory_utilization``.
        memory_utilization: fraction of the device's free memory (after the weights are loaded)
            that the engine may take when no byte budget is given: the KV cache, and, where the
            device can measure them, the largest step and captured graphs beside it.
        num_blocks: exact number of blocks, overriding both budgets; for tests.
        kv_cache_dtype: of the cache; ``auto`` is the model's, or float16 beside quantised weights
            where that is float32. ``float32``, ``bfloat16``, ``float16`` and ``int8`` work on every
            platform, with any dtype of the model; ``fp8`` (``float8_e4m3``) where the platform's
            attention has it.
        enable_prefix_caching: reuse full blocks of equal prefixes.
    """

    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float | None = None
    num_blocks: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool | None = None
