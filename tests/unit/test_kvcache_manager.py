"""The manager against a naive count of who holds what and a naive memory."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_helpers import kv_config

from cardan.core.kvcache.manager import KVCacheManager
from cardan.core.kvcache.prefix import extend_chain, root_hash
from cardan.core.types.errors import ConfigError
from cardan.core.types.kv import KVCacheConfig, KVCacheGroup, KVCacheSpec

ROOT = root_hash(None, None)
SIZE = 2


def tokens(*values):
    return np.array(values, np.int32)


class Holder:
    def __init__(self, blocks, token_ids):
        self.blocks, self.token_ids, self.computed = blocks, token_ids, 0
        self.key = None


class ManagerAgainstModel(RuleBasedStateMachine):
    """``memory[group][block]`` is the list of token prefixes whose KV stands in the block."""

    def __init__(self):
        super().__init__()
        self.manager = KVCacheManager(kv_config(10, SIZE, 2), True)
        self.memory = [{b: [None] * SIZE for b in range(10)} for _ in range(2)]
        self.holders = []
        self.num_keys = self.num_withdrawn = 0

    def write(self, holder, start, stop):
        for memory, blocks in zip(self.memory, holder.blocks.blocks, strict=True):
            for place in range(start, stop):
                prefix = tuple(holder.token_ids[: place + 1].tolist())
                memory[blocks[place // SIZE]][place % SIZE] = prefix

    def check_content(self, holder):
        for memory, blocks in zip(self.memory, holder.blocks.blocks, strict=True):
            for place in range(holder.computed):
                expected = tuple(holder.token_ids[: place + 1].tolist())
                assert memory[blocks[place // SIZE]][place % SIZE] == expected

    def pick(self, data):
        return data.draw(st.sampled_from(self.holders))

    @rule(values=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def start(self, values):
        holder = Holder(self.manager.new_sequence(ROOT, ()), tokens(*values))
        free = self.manager.num_free
        prefix = self.manager.find_cached(holder.blocks, holder.token_ids)
        assert self.manager.num_free == free
        assert prefix.num_blocks * SIZE < len(values)
        for group, ids in enumerate(prefix.block_ids):
            counts = self.manager.ref_counts(group, ids)
            assert sum(count == 0 for count in counts) == prefix.num_free
        self.manager.attach(holder.blocks, prefix)
        assert self.manager.num_free == free - prefix.num_free
        holder.computed = prefix.num_blocks * SIZE
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def announce(self, data):
        holder = self.pick(data)
        if holder.key is None:
            holder.key = self.num_keys = self.num_keys + 1
            self.manager.announce(holder.blocks, holder.token_ids, holder.key)

    @rule()
    def name_announced(self):
        self.manager.name_announced()

    @rule(values=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def ask_who_computes_the_next_block(self, values):
        asking, token_ids = self.manager.new_sequence(ROOT, ()), tokens(*values)
        key = self.manager.announcer_of_next(asking, token_ids)
        count = self.manager.find_cached(asking, token_ids).num_blocks + 1
        lacked = token_ids[: count * SIZE].tolist()
        holders = [
            holder
            for holder in self.holders
            if holder.key is not None
            and holder.token_ids[: len(lacked)].tolist() == lacked
            and holder.blocks.num_registered < count
        ]
        if count * SIZE >= len(values):
            # The last token is computed in any case.
            assert key is None
        elif key is None:
            # Of several that compute a block one announces it; it may have been freed.
            assert len(holders) != 1 or self.num_withdrawn
        else:
            assert key in [holder.key for holder in holders]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), more=st.integers(0, 5))
    def compute(self, data, more):
        holder = self.pick(data)
        stop = min(holder.computed + more, len(holder.token_ids))
        missing = -(-stop // SIZE) - holder.blocks.num_blocks
        free = self.manager.num_free
        added = self.manager.extend(holder.blocks, stop)
        if missing > free:
            assert added is None
            assert self.manager.num_free == free
            return
        assert [len(ids) for ids in added] == [max(missing, 0)] * 2
        self.write(holder, holder.computed, stop)
        holder.computed = stop
        self.manager.register(holder.blocks, holder.token_ids[:stop], stop)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), values=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def fork(self, data, values):
        parent = self.pick(data)
        if not parent.computed:
            return
        count = data.draw(st.integers(1, parent.computed))
        token_ids = np.concatenate([parent.token_ids[:count], tokens(*values)])
        child = Holder(self.manager.new_sequence(ROOT, ()), token_ids)
        if data.draw(st.booleans()):
            self.manager.find_cached(child.blocks, token_ids)
        free = self.manager.num_free
        copies = self.manager.fork(parent.blocks, child.blocks, count)
        if copies is None:
            assert count % SIZE
            assert not free
            assert child.blocks.num_blocks == 0
            return
        for memory, pairs, ours, theirs in zip(
            self.memory, copies, child.blocks.blocks, parent.blocks.blocks, strict=True
        ):
            assert ours[: count // SIZE] == theirs[: count // SIZE]
            assert len(pairs) == bool(count % SIZE)
            for source, target in pairs:
                assert source == theirs[count // SIZE]
                assert target == ours[-1] != source
                memory[target] = list(memory[source])
        child.computed = count
        self.holders.append(child)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), forget=st.booleans())
    def free(self, data, forget):
        holder = self.pick(data)
        self.holders.remove(holder)
        ids = list(holder.blocks.blocks[0])
        self.num_withdrawn += holder.key is not None
        self.manager.free(holder.blocks, forget)
        assert holder.blocks.num_blocks == holder.blocks.num_registered == 0
        if forget:
            pool = self.manager._pools[0]
            assert not set(ids) & set(pool._cached.values())

    @rule()
    def reset(self):
        self.manager.reset_prefix_cache()
        assert self.manager.num_cached == 0

    @invariant()
    def counts_are_those_of_the_holders(self):
        for group in range(2):
            count = Counter(b for h in self.holders for b in h.blocks.blocks[group])
            assert 0 not in count
            expected = [count[b] for b in range(10)]
            assert self.manager.ref_counts(group, range(10)) == expected
        assert self.manager.num_used == len(count)
        assert self.manager.num_free == 9 - len(count)
        assert self.manager.usage == len(count) / 9

    @invariant()
    def announcers_live(self):
        keys = {holder.key for holder in self.holders}
        assert set(self.manager._announced.values()) <= keys - {None}
        if not self.holders:
            assert self.manager.num_announced == 0

    @invariant()
    def content_is_right(self):
        for holder in self.holders:
            self.check_content(holder)

    @invariant()
    def names_tell_the_content(self):
        for pool, memory in zip(self.manager._pools, self.memory, strict=True):
            for block_hash, block in pool._cached.items():
                prefix = memory[block][-1]
                assert prefix is not None
                hashes = []
                extend_chain(hashes, ROOT, tokens(*prefix), SIZE, len(prefix) // SIZE)
                assert hashes[-1] == block_hash


ManagerAgainstModel.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
test_manager_against_model = ManagerAgainstModel.TestCase


def filled(manager, token_ids):
    sequence = manager.new_sequence(ROOT, ())
    assert manager.extend(sequence, len(token_ids)) is not None
    manager.register(sequence, token_ids, len(token_ids))
    return sequence


@pytest.mark.parametrize("length", range(1, 10))
def test_the_last_token_is_never_taken_from_the_cache(length):
    manager = KVCacheManager(kv_config(20, 4), True)
    token_ids = tokens(*range(12))
    manager.free(filled(manager, token_ids))
    prefix = manager.find_cached(manager.new_sequence(ROOT, ()), token_ids[:length])
    assert prefix.num_blocks == (length - 1) // 4


def test_who_finds_no_block_makes_one_hash_and_an_announcement_none():
    manager = KVCacheManager(kv_config(40, 4), True)
    token_ids = tokens(*range(100))
    sequence = manager.new_sequence(ROOT, ())
    manager.attach(sequence, manager.find_cached(sequence, token_ids))
    assert len(sequence.hashes) == 1
    manager.extend(sequence, 100)
    manager.announce(sequence, token_ids, 7)
    assert len(sequence.hashes) == 1
    manager.name_announced()
    assert len(sequence.hashes) == 25
    assert set(manager._announced.values()) == {7}
    assert manager.num_announced == 25


@pytest.mark.parametrize("cached", range(0, 26))
def test_a_prefix_of_any_length_is_found_whole(cached):
    manager = KVCacheManager(kv_config(80, 4), True)
    token_ids = tokens(*range(100))
    filled(manager, token_ids[: 4 * cached])
    asking = manager.new_sequence(ROOT, ())
    assert manager.find_cached(asking, token_ids).num_blocks == min(cached, 24)
    expected = []
    extend_chain(expected, ROOT, token_ids, 4, len(asking.hashes))
    assert asking.hashes == expected


def test_what_was_announced_by_a_sequence_freed_before_it_had_a_name_is_void():
    manager = KVCacheManager(kv_config(20, 4), True)
    token_ids = tokens(*range(12))
    sequence = manager.new_sequence(ROOT, ())
    manager.extend(sequence, 12)
    manager.announce(sequence, token_ids, 7)
    manager.free(sequence)
    assert manager.announcer_of_next(manager.new_sequence(ROOT, ()), token_ids) is None
    assert manager.num_announced == 0


def test_without_prefix_caching_nothing_is_found_or_hashed():
    manager = KVCacheManager(kv_config(20, 4), False)
    token_ids = tokens(*range(12))
    sequence = filled(manager, token_ids)
    assert (sequence.hashes, sequence.num_registered, manager.num_cached) == ([], 3, 0)
    found = manager.find_cached(manager.new_sequence(ROOT, ()), token_ids)
    assert (found.num_blocks, found.num_free) == (0, 0)


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    manager = KVCacheManager(kv_config(5, 4), True)
    token_ids = tokens(*range(16))
    manager.free(filled(manager, token_ids))
    for taken in range(1, 4):
        other = manager.new_sequence(ROOT, ())
        manager.extend(other, 4)
        found = manager.find_cached(manager.new_sequence(ROOT, ()), np.append(token_ids, 0))
        assert found.num_blocks == 4 - taken


def test_a_child_that_looked_for_a_prefix_first_still_names_its_blocks_right():
    manager = KVCacheManager(kv_config(20, 2), True)
    token_ids = tokens(1, 2, 3, 4, 5, 6, 7)
    parent = filled(manager, token_ids[:6])
    child = manager.new_sequence(ROOT, ())
    manager.find_cached(child, token_ids)
    manager.fork(parent, child, 6)
    manager.extend(child, 7)
    child_ids = np.append(token_ids, 8).astype(np.int32)
    manager.register(child, child_ids, 8)
    expected = []
    extend_chain(expected, ROOT, child_ids, 2, 4)
    assert child.hashes == expected


def test_what_a_failure_forgets_stays_with_other_holders():
    manager = KVCacheManager(kv_config(20, 4), True)
    token_ids = tokens(*range(9))
    bad = filled(manager, token_ids)
    other = manager.new_sequence(ROOT, ())
    manager.attach(other, manager.find_cached(other, token_ids))
    manager.free(bad, forget=True)
    assert manager.find_cached(manager.new_sequence(ROOT, ()), token_ids).num_blocks == 0
    assert manager.ref_counts(0, other.blocks[0]) == [1, 1]
    manager.free(other)
    assert manager.num_used == manager.num_cached == 0


def test_groups_must_be_of_a_kind_and_size_that_is_supported():
    full = KVCacheSpec("full", 4, 1, 2, 2, "float32")
    window = KVCacheSpec("sliding_window", 4, 1, 2, 2, "float32", window=8)
    wide = KVCacheSpec("full", 8, 1, 2, 2, "float32")
    with pytest.raises(ConfigError, match="sliding_window are not supported"):
        KVCacheManager(_config(full, window), True)
    with pytest.raises(ConfigError, match="same block size"):
        KVCacheManager(_config(full, wide), True)


def _config(*specs):
    return KVCacheConfig(tuple(KVCacheGroup((i,), spec) for i, spec in enumerate(specs)), 4)
