"""How one model is spread over ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Settings of parallel execution.

    Attributes:
        tensor_parallel_size: ranks that share each layer.
    """

    tensor_parallel_size: int = 1
