"""A simulated device with paged memory.

The "model": each token's KV is a digest of the domain and all tokens up to it; the next token is
a hash of that digest and the sequence's seed. The device applies plans literally and refuses to
compute on a position whose slots do not hold the right digest, so a lost block, a stale share, a
missing copy or a wrong slot shows at once.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from cardan.core.types.request import FinishReason
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import LogprobsArrays, ModelRunnerOutput

VOCAB = 23
EOS = 3
EMPTY, POISON = 0, -1
FAILURE = "the logits are not numbers"


class Stream:
    """Digests of the tokens of one sequence."""

    def __init__(self, request):
        self.media = request.media
        self.start = hash_of(f"{request.cache_salt!r} {request.adapter!r}")
        self.values = []

    def upto(self, token_ids):
        for position in range(len(self.values), len(token_ids)):
            previous = self.values[-1] if self.values else self.start
            shown = [
                (hash_of(span.key), span.length, position - span.offset)
                for span in self.media
                if span.offset <= position < span.offset + span.length
            ]
            value = hash((previous, int(token_ids[position]), *shown))
            self.values.append(value | 1)  # never EMPTY; POISON is as unlikely as any other
        return self.values


def hash_of(text):
    return int.from_bytes(text.encode(), "little")


def sample(value, seed):
    return (hash((value, seed)) >> 7) % VOCAB


def reference(request, index=0):
    """Tokens, reason and stop token of sample ``index``, generated alone and one by one."""
    params = request.params
    seed = params.seed + index
    stream = Stream(request)
    answer = []
    while len(answer) < request.max_tokens:
        token_id = sample(stream.upto([*request.prompt_token_ids, *answer])[-1], seed)
        answer.append(token_id)
        if len(answer) > params.min_tokens:
            if token_id in request.eos_token_ids and (
                not params.ignore_eos or token_id in params.stop_token_ids
            ):
                return answer, FinishReason.STOP, None
            if token_id in params.stop_token_ids:
                return answer, FinishReason.STOP, token_id
    return answer, FinishReason.LENGTH, None


@dataclass
class DeviceRow:
    key: int
    tokens: list
    num_prompt: int
    params: SamplingParams
    seed: int
    stream: Stream
    is_bad: bool = False

    def known_digests(self):
        return self.stream.upto(self.tokens)


class FakeDevice:
    """Executes plans on a simulated paged memory, in the order in which it gets them."""

    def __init__(self, num_groups, num_blocks, block_size, max_rows):
        self.block_size = block_size
        self.memory = [np.zeros((num_blocks, block_size), np.int64) for _ in range(num_groups)]
        self.tables = [np.full((max_rows, num_blocks), -1, np.int64) for _ in range(num_groups)]
        self.rows = [None] * max_rows
        self.requests = {}
        self.failed_keys = Counter()
        self.next_step = 0

    def execute(self, plan, fails=lambda key: False, spoils=lambda key: False):
        """``fails``: whose sampling step fails; ``spoils``: whose chunk holds no numbers."""
        assert plan.step_id == self.next_step
        self.next_step += 1
        self._apply(plan)
        work = list(
            zip(
                plan.rows.tolist(),
                plan.num_computed_tokens.tolist(),
                plan.num_scheduled_tokens.tolist(),
                plan.samples.tolist(),
                plan.keys.tolist(),
                strict=True,
            )
        )
        for row, start, _count, _samples, key in work:
            assert self.rows[row] is not None, f"row {row} is empty"
            assert self.rows[row].key == key
            self._check(row, start)
        bad = {row for row, *_rest, samples, key in work if samples and fails(key)}
        spoiled = {row for row, *_rest, key in work if spoils(key)}
        for row in spoiled:
            self.rows[row].is_bad = True
            self.failed_keys[self.rows[row].key] += 1
        self._write(work, bad)
        for row, start, count, *_rest in work:
            if row not in bad:
                self._check(row, start + count)
        result = self._results(work, bad)
        if spoiled:
            result.corrupt = np.array([self.rows[row].is_bad for row, *_rest in work])
        return result

    def _apply(self, plan):
        for row in plan.freed_rows:
            assert self.rows[row] is not None, f"row {row} freed twice"
            self.rows[row] = None
            for table in self.tables:
                table[row] = -1
        for new in plan.new_rows:
            assert self.rows[new.row] is None, f"row {new.row} is taken"
            self.rows[new.row] = DeviceRow(
                new.key,
                new.token_ids.tolist(),
                new.num_prompt_tokens,
                new.params,
                new.seed,
                Stream(self.requests[new.key]),
            )
            for table, ids in zip(self.tables, new.block_ids, strict=True):
                table[new.row, : len(ids)] = ids
        for table, edits in zip(self.tables, plan.block_edits, strict=True):
            for row in edits.rows.tolist():
                assert self.rows[row] is not None
            table[edits.rows, edits.columns] = edits.block_ids
        for memory, copies in zip(self.memory, plan.block_copies, strict=True):
            assert not set(copies.sources.tolist()) & set(copies.targets.tolist())
            assert len(set(copies.targets.tolist())) == len(copies.targets)
            memory[copies.targets] = memory[copies.sources]

    def _check(self, row, stop):
        state = self.rows[row]
        if state.is_bad or stop == 0:
            return
        columns = -(-stop // self.block_size)
        expected = np.array(state.known_digests()[:stop], np.int64)
        assert len(expected) == stop, f"row {row} computes tokens that it does not have"
        for memory, table in zip(self.memory, self.tables, strict=True):
            ids = table[row, :columns]
            assert (ids > 0).all(), f"row {row} lacks a block: {ids}"
            content = memory[ids].reshape(-1)[:stop]
            wrong = np.flatnonzero(content != expected)
            assert not len(wrong), f"key {state.key} row {row}: wrong content at {wrong.tolist()}"

    def _write(self, work, bad):
        for memory, table in zip(self.memory, self.tables, strict=True):
            written = set()
            for row, start, count, *_rest in work:
                state = self.rows[row]
                if row not in bad and not state.is_bad:
                    assert start + count <= len(state.tokens)
                for position in range(start, start + count):
                    block = int(table[row, position // self.block_size])
                    slot = (block, position % self.block_size)
                    assert block > 0, f"row {row} writes without a block at {position}"
                    assert slot not in written, f"slot {slot} is written twice in a step"
                    written.add(slot)
                    is_good = row not in bad and not state.is_bad
                    memory[slot] = state.known_digests()[position] if is_good else POISON
            self._check_isolation(table, work)

    def _check_isolation(self, table, work):
        """No row reads a block that another row writes in this step."""
        size = self.block_size
        writers = {}
        for row, start, count, *_rest in work:
            for block in table[row, start // size : -(-(start + count) // size)].tolist():
                assert writers.setdefault(block, row) == row
        for row, start, count, *_rest in work:
            for block in table[row, : -(-(start + count) // size)].tolist():
                assert writers.get(block, row) == row, f"row {row} reads what another one writes"

    def _results(self, work, bad):
        token_ids, failed, logprobs, prompt = [], [], {}, {}
        for row, start, count, samples, key in work:
            state = self.rows[row]
            stop = start + count
            if state.params.prompt_logprobs is not None:
                positions = np.arange(start + 1, min(stop + 1, state.num_prompt), dtype=np.int32)
                if len(positions):
                    prompt[row] = _arrays([state.tokens[p] for p in positions], positions)
            if not samples:
                continue
            if row in bad:
                state.is_bad = True
                self.failed_keys[key] += 1
            failed.append(state.is_bad)
            token_id = 0 if state.is_bad else sample(state.known_digests()[stop - 1], state.seed)
            assert state.is_bad or stop == len(state.tokens)
            state.tokens.append(token_id)
            token_ids.append(token_id)
            if state.params.logprobs is not None and not state.is_bad:
                logprobs[row] = _arrays([token_id], np.array([stop], np.int32))
        return ModelRunnerOutput(
            token_ids=np.array(token_ids, np.int32).reshape(-1, 1),
            num_sampled=np.array([0 if bad else 1 for bad in failed], np.int32),
            failed=np.array(failed, np.bool_),
            failures={place: FAILURE for place, is_bad in enumerate(failed) if is_bad},
            logprobs=logprobs,
            prompt_logprobs=prompt,
        )


def _arrays(token_ids, positions):
    """A table whose values tell their position."""
    ids = np.stack([np.array(token_ids, np.int32), np.full(len(positions), 1, np.int32)], axis=1)
    values = np.stack([-positions, -positions - 1], axis=1).astype(np.float32)
    return LogprobsArrays(ids, values, positions)
