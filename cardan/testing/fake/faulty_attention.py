"""Attention backends with a fault, for tests of what is to notice it."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.attention import AttentionBackend, BatchView, LayerParams
from cardan.testing.fake.settings import StandingFault


def faulty(
    backends: Sequence[type[AttentionBackend]], faults: Collection[StandingFault]
) -> Sequence[type[AttentionBackend]]:
    """Subclasses of ``backends``, under their names, that have those of ``faults`` which concern
    attention: ``wrong_mask``, ``window_off_by_one``, ``stale_block``, ``lost_write``."""
    return tuple(_faulty(backend, frozenset(faults)) for backend in backends)


def _faulty(
    base: type[AttentionBackend], faults: frozenset[StandingFault]
) -> type[AttentionBackend]:
    class FaultyAttention(base):  # type: ignore[valid-type, misc]
        """Shows its base another step, or another layer, than the engine does."""

        # Block table of the step before, as it was then.
        _last_table: Tensor | None = None

        def plan(self, batch: BatchView) -> Any:
            if "stale_block" in faults:
                batch, self._last_table = _with_stale_blocks(batch, self._last_table)
            if "lost_write" in faults:
                batch = _without_last_write(batch)
            if "wrong_mask" in faults:
                batch = _with_one_key_more(batch)
            return super().plan(batch)

        def run(
            self,
            q: Tensor,
            cache: Tensor,
            plan: Any,
            layer: LayerParams,
            lse: Tensor | None = None,
        ) -> Tensor:
            if "window_off_by_one" in faults and layer.window is not None:
                layer = replace(layer, window=layer.window + 1)
            out: Tensor = super().run(q, cache, plan, layer, lse)
            return out

    FaultyAttention.__name__ = f"Faulty{base.__name__}"
    return FaultyAttention


def _with_stale_blocks(batch: BatchView, last: Tensor | None) -> tuple[BatchView, Tensor]:
    """``batch`` with the entries of the table ``last``, and a copy of the table it had."""
    table = batch.block_table.clone()
    if last is None:
        return batch, table
    stale = table.clone()
    rows, width = (min(a, b) for a, b in zip(stale.shape, last.shape, strict=True))
    stale[:rows, :width] = last[:rows, :width]
    return replace(batch, block_table=stale), table


def _without_last_write(batch: BatchView) -> BatchView:
    """``batch`` with the last row's last token as padding to be written nowhere."""
    slots = batch.slot_mapping.clone()
    slots[sum(batch.query_lens) - 1 :] = -1
    return replace(batch, slot_mapping=slots)


def _with_one_key_more(batch: BatchView) -> BatchView:
    """``batch`` as if each row were one token further; the tables get a column for it."""
    table = torch.nn.functional.pad(batch.block_table, (0, 1))
    seq_lens = [
        length + 1 if count else length
        for count, length in zip(batch.query_lens, batch.seq_lens_host, strict=True)
    ]
    return replace(
        batch,
        seq_lens_host=seq_lens,
        seq_lens=torch.tensor(seq_lens, device=batch.seq_lens.device),
        positions=batch.positions + 1,
        block_table=table,
        max_seq_len=max(seq_lens),
    )
