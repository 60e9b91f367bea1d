"""What the fake executor computes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cardan.core.types.kv import KVCacheSpec
from cardan.core.types.step import BlockCopies, Int32, ModelRunnerOutput
from cardan.testing.fake.host_sampling import sample_rows
from cardan.testing.fake.numpy_llama import NumpyLlama
from cardan.testing.fake.rows import DeviceRows, StepBatch

UInt64 = npt.NDArray[np.uint64]


class StepModel(Protocol):
    """A model together with its paged memory."""

    weight_bytes: int

    def specs(self, block_size: int) -> Sequence[KVCacheSpec]: ...

    def bind(self, num_blocks: int, block_size: int) -> None:
        """Make the memory."""

    def copy_blocks(self, copies: BlockCopies) -> None: ...

    def run(self, batch: StepBatch, rows: DeviceRows) -> ModelRunnerOutput:
        """Compute a step, writing to the memory, and sample."""


class DigestModel:
    """Tokens from a hash of all tokens before, read back from the paged memory.

    Slot p of a sequence holds the sum over i <= p of ``(token_i + 1) * BASE**i`` modulo 2**64, and
    the next token is a mix of that sum and, unless greedy, of the seed: whatever is not where the
    block table says changes the answer. The work of a step is a few array operations.
    """

    BASE = 0x9E3779B97F4A7C15
    weight_bytes = 0

    def __init__(self, vocab_size: int, max_model_len: int) -> None:
        self._vocab_size = vocab_size
        powers = np.full(max_model_len, self.BASE, np.uint64)
        powers[0] = 1
        self._powers: UInt64 = np.cumprod(powers)
        self._memory = np.zeros((0, 1), np.uint64)

    def specs(self, block_size: int) -> Sequence[KVCacheSpec]:
        return [KVCacheSpec("full", block_size, 1, 1, 1, "float32")]

    def bind(self, num_blocks: int, block_size: int) -> None:
        self._memory = np.zeros((num_blocks, block_size), np.uint64)

    def copy_blocks(self, copies: BlockCopies) -> None:
        self._memory[copies.targets] = self._memory[copies.sources]

    def run(self, batch: StepBatch, rows: DeviceRows) -> ModelRunnerOutput:
        memory = self._memory.reshape(-1)
        terms = (batch.token_ids.astype(np.uint64) + np.uint64(1)) * self._powers[batch.positions]
        sums = np.cumsum(terms, dtype=np.uint64)
        # Row by row: minus what other rows added before, plus what this row had.
        offsets = self._before(batch, memory) - (sums - terms)[batch.starts]
        sums += np.repeat(offsets, batch.counts)
        memory[batch.slots] = sums
        places = batch.rows[batch.sampling]
        greedy = np.array([rows.params(row).is_greedy for row in places.tolist()], np.bool_)
        seeds = np.where(greedy, 0, rows.seeds[places]).astype(np.uint64)
        token_ids = (_mixed(sums[batch.last] ^ _mixed(seeds)) % np.uint64(self._vocab_size)).astype(
            np.int32
        )
        return plain_output(token_ids)

    @staticmethod
    def _before(batch: StepBatch, memory: UInt64) -> UInt64:
        """[R] what the memory holds for the token before each row's first one."""
        position = np.maximum(batch.computed - 1, 0)
        block = batch.block_table[np.arange(len(position)), position // batch.block_size]
        held = memory[block.astype(np.int64) * batch.block_size + position % batch.block_size]
        return np.where(batch.computed > 0, held, np.uint64(0))


class LlamaModel:
    """A Llama with its cache and a sampler on the host."""

    def __init__(self, config: Mapping[str, Any], tensor: Callable[[str], npt.ArrayLike]) -> None:
        self._llama = NumpyLlama(config, tensor)
        self.weight_bytes = self._llama.weight_bytes
        self._cache = self._llama.make_cache(0, 1)

    def specs(self, block_size: int) -> Sequence[KVCacheSpec]:
        sizes = self._llama.sizes
        dim = sizes.head_dim
        spec = KVCacheSpec("full", block_size, sizes.num_kv_heads, dim, dim, "float32")
        return [spec] * sizes.num_layers

    def bind(self, num_blocks: int, block_size: int) -> None:
        self._cache = self._llama.make_cache(num_blocks, block_size)

    def copy_blocks(self, copies: BlockCopies) -> None:
        self._cache[:, :, copies.targets] = self._cache[:, :, copies.sources]

    def run(self, batch: StepBatch, rows: DeviceRows) -> ModelRunnerOutput:
        ends = batch.starts + batch.counts
        spans = [
            (int(start), int(end), table, int(length))
            for start, end, table, length in zip(
                batch.starts, ends, batch.block_table, batch.computed + batch.counts, strict=True
            )
        ]
        logits = self._llama.forward(
            batch.token_ids, batch.positions, batch.slots, spans, self._cache, batch.last
        )
        return sample_rows(logits, batch, rows)


def plain_output(token_ids: Int32) -> ModelRunnerOutput:
    """One sound token for each sampling row."""
    count = len(token_ids)
    return ModelRunnerOutput(
        token_ids=token_ids[:, None],
        num_sampled=np.ones(count, np.int32),
        failed=np.zeros(count, np.bool_),
    )


def _mixed(values: UInt64) -> UInt64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable generators, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
