"""Builds and runs our models on the CPU over reference ops and paged reference attention."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from cardan.core.interfaces.attention import BatchView, KVLayout
from cardan.core.interfaces.communication import Communicator
from cardan.core.interfaces.model import BuildContext, CausalLM, LayerCache, StepContext
from cardan.core.interfaces.thread_communicator import ThreadCommunicator
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.reference.attention import ReferenceAttention
from cardan.core.ops.registry import KernelRegistry
from cardan.core.weights.hf_checkpoint import HFCheckpoint
from cardan.core.weights.loader import load_weights
from cardan.models.gemma2 import Gemma2ForCausalLM
from cardan.models.gemma3 import Gemma3ForCausalLM
from cardan.models.llama import LlamaForCausalLM
from cardan.models.mistral import MistralForCausalLM
from cardan.models.mixtral import MixtralForCausalLM
from cardan.models.qwen2 import Qwen2ForCausalLM
from cardan.models.qwen3 import Qwen3ForCausalLM
from cardan.models.qwen3_moe import Qwen3MoeForCausalLM

ARCHITECTURES: dict[str, type[CausalLM]] = {
    cls.__name__: cls
    for cls in (
        LlamaForCausalLM,
        MistralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
        MixtralForCausalLM,
        Gemma2ForCausalLM,
        Gemma3ForCausalLM,
    )
}


def reference_ops() -> KernelRegistry:
    """The operations' definitions, without any provider."""
    return KernelRegistry(CATALOGUE, (), device=torch.device("cpu"), features=())


def build_context(**changes: Any) -> BuildContext:
    """A context for the CPU in float32, with ``changes``."""
    values = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "ops": reference_ops(),
        "max_model_len": 128,
        "block_size": 16,
        "kv_dtype": "float32",
    }
    return BuildContext(**{**values, **changes})


def build_model(config: Mapping[str, Any], **changes: Any) -> CausalLM:
    """The model of ``config['architectures']``, not loaded."""
    return ARCHITECTURES[config["architectures"][0]](config, build_context(**changes))


def load_model(directory: Path, **changes: Any) -> CausalLM:
    """The model saved in ``directory``."""
    checkpoint = HFCheckpoint(directory)
    model = build_model(checkpoint.config, **changes)
    load_weights(model, checkpoint)
    return model


class Batch:
    """Sequences that a model computes over one paged cache, in steps of any shape."""

    def __init__(self, model: CausalLM, num_rows: int, max_len: int = 128) -> None:
        self.model = model
        self.num_computed_tokens = [0] * num_rows
        spec = model.kv_specs()[0]
        assert all(other == spec for other in model.kv_specs())
        self._block_size = spec.block_size
        blocks_per_row = max_len // spec.block_size
        # Blocks of a row are scattered; block 0 belongs to nobody.
        blocks = (
            torch.randperm(num_rows * blocks_per_row, generator=torch.Generator().manual_seed(0))
            + 1
        )
        self._blocks = blocks.view(num_rows, blocks_per_row).to(torch.int32)
        self._backend = ReferenceAttention(spec, KVLayout(), None)
        shape = (blocks.numel() + 1, 2, spec.block_size, spec.num_kv_heads, spec.k_head_dim)
        dtype = getattr(torch, spec.dtype)
        # What was never written must never be seen.
        self._layers = [
            LayerCache(self._backend, torch.full(shape, float("nan"), dtype=dtype), group=0)
            for _ in model.kv_specs()
        ]

    @torch.inference_mode()
    def step(self, tokens: Mapping[int, list[int]]) -> dict[int, torch.Tensor]:
        """Logits [len(tokens[row]), vocab_size] of the next tokens of each row in ``tokens``."""
        rows, lens = list(tokens), [len(ids) for ids in tokens.values()]
        starts = [self.num_computed_tokens[row] for row in rows]
        for row, length in zip(rows, lens, strict=True):
            self.num_computed_tokens[row] += length
        seq_lens = [self.num_computed_tokens[row] for row in rows]
        positions = torch.cat([torch.arange(a, b) for a, b in zip(starts, seq_lens, strict=True)])
        token_rows = torch.arange(len(rows)).repeat_interleave(torch.tensor(lens))
        block_table = self._blocks[rows]
        blocks = block_table[token_rows, positions // self._block_size].to(torch.int64)
        batch = BatchView(
            query_lens=lens,
            seq_lens_host=seq_lens,
            query_start_loc=torch.tensor([0, *lens]).cumsum(0),
            seq_lens=torch.tensor(seq_lens),
            positions=positions,
            token_rows=token_rows,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            block_table=block_table,
            max_query_len=max(lens),
            max_seq_len=max(seq_lens),
        )
        step = StepContext(
            positions=positions, layers=self._layers, plans=[self._backend.plan(batch)]
        )
        token_ids = torch.tensor([token_id for ids in tokens.values() for token_id in ids])
        logits = self.model.compute_logits(self.model.forward(token_ids, step))
        return dict(zip(rows, logits.split(lens), strict=True))


class Sequence:
    """One sequence that a model computes chunk by chunk."""

    def __init__(self, model: CausalLM) -> None:
        self._batch = Batch(model, num_rows=1)

    def extend(self, token_ids: list[int]) -> torch.Tensor:
        """Logits [len(token_ids), vocab_size] of the next tokens of the sequence."""
        return self._batch.step({0: token_ids})[0]


class StrictCommunicator(ThreadCommunicator):
    """Holds callers to the contract: only contiguous tensors are exchanged."""

    def all_reduce(self, tensor, op="sum"):
        assert tensor.is_contiguous()
        return super().all_reduce(tensor, op)

    def all_gather(self, tensor, dim=0):
        assert tensor.is_contiguous()
        return super().all_gather(tensor, dim)


def run_ranks(world_size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """``work(communicator)`` of every rank, each in a thread; the results by rank."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(work, StrictCommunicator.group(world_size)))
