"""Both ways to gather a step give the same tensors."""

import numpy as np
import pytest
import torch

from cardan.core.runner.block_tables import BlockTables
from cardan.core.runner.host_input_batch import HostInputBatch
from cardan.core.runner.input_batch import InputBatch
from cardan.core.runner.request_states import RequestStates
from cardan.core.runner.step_shapes import StepShape
from cardan.core.types.step import SchedulerOutput

BLOCK = 4
MOST_ROWS, MOST_LEN, GROUPS = 12, 64, 2
CPU = torch.device("cpu")


def step(rng, *, decode: bool) -> SchedulerOutput:
    num_rows = int(rng.integers(1, MOST_ROWS + 1))
    computed = rng.integers(0, 30, num_rows).astype(np.int32)
    counts = np.ones(num_rows, np.int32) if decode else rng.integers(1, 9, num_rows)
    return SchedulerOutput(
        step_id=0,
        new_rows=[],
        freed_rows=[],
        block_edits=(),
        block_copies=(),
        rows=rng.permutation(MOST_ROWS)[:num_rows].astype(np.int32),
        keys=np.arange(num_rows, dtype=np.int64),
        num_scheduled_tokens=counts.astype(np.int32),
        num_computed_tokens=computed,
        samples=np.ones(num_rows, np.bool_) if decode else rng.random(num_rows) < 0.5,
    )


@pytest.mark.parametrize("decode", [True, False])
def test_both_gather_the_same(decode):
    rng = np.random.default_rng()
    tables = BlockTables(GROUPS, MOST_ROWS, MOST_LEN // BLOCK, CPU)
    for table in tables.tables:
        table.copy_(torch.from_numpy(rng.integers(0, 999, table.shape)))
    states = RequestStates(MOST_ROWS, MOST_LEN, CPU, on_host=True)
    states.token_ids.copy_(torch.from_numpy(rng.integers(0, 9999, states.token_ids.shape)))
    usual, host = (kind(128, 16, tables, BLOCK) for kind in (InputBatch, HostInputBatch))
    for _ in range(60):
        plan = step(rng, decode=decode)
        num_tokens, num_rows = plan.num_tokens, len(plan.rows)
        extra = rng.integers(0, 4)
        shape = StepShape(num_tokens + int(extra), num_rows + int(extra), MOST_LEN // BLOCK, decode)
        num_logits = int(plan.samples.sum()) + int(extra)
        wanted = usual.gather(plan, states, shape, num_logits)
        found = host.gather(plan, states, shape, num_logits)
        assert torch.equal(found.token_ids[:num_tokens], wanted.token_ids[:num_tokens])
        assert torch.equal(found.logit_places, wanted.logit_places)
        assert torch.equal(found.positions, wanted.positions)
        for mine, theirs in zip(found.views, wanted.views, strict=True):
            for name in ("query_start_loc", "seq_lens", "positions", "token_rows", "slot_mapping"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
            assert torch.equal(mine.block_table[:num_rows], theirs.block_table[:num_rows])
            for name in ("query_lens", "seq_lens_host", "max_query_len", "max_seq_len"):
                assert getattr(mine, name) == getattr(theirs, name), name


@pytest.mark.parametrize("on_host", [True, False])
def test_sampled_tokens_are_where_the_next_step_reads(on_host):
    states = RequestStates(4, 8, CPU, on_host=on_host)
    states.append(np.array([2, 0]), np.array([3, 7]), torch.tensor([11, 12]))
    assert states.token_ids[2, 3] == 11
    assert states.token_ids[0, 7] == 12
    assert states.token_ids.sum() == 23
