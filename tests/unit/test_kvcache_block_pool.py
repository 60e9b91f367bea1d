"""The block pool against a list that is searched anew for every question."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cardan.core.kvcache.block_pool import BlockPool

NUM_BLOCKS = 8


class NaiveBlock:
    def __init__(self, block_id):
        self.id, self.count, self.hash, self.freed = block_id, 0, None, 0


class PoolAgainstModel(RuleBasedStateMachine):
    """``freed`` is the time of the release. The model decides which blocks may be taken."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.blocks = {i: NaiveBlock(i) for i in range(1, NUM_BLOCKS)}
        self.time = 0

    def free(self):
        return [block for block in self.blocks.values() if block.count == 0]

    def used(self):
        return [block for block in self.blocks.values() if block.count]

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        if count > len(self.free()):
            before = self.pool.num_free
            with pytest.raises(RuntimeError, match="asked for"):
                self.pool.allocate(count)
            assert self.pool.num_free == before
            return
        for block_id in self.pool.allocate(count):
            block = self.blocks[block_id]
            assert block.count == 0
            uncached = [other for other in self.free() if other.hash is None]
            if uncached:
                assert block.hash is None, "a cached block was taken while others were empty"
            else:
                assert block.freed == min(other.freed for other in self.free())
            block.count, block.hash = 1, None

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def release(self, data):
        some = data.draw(st.lists(st.sampled_from(self.used()), unique=True, max_size=4))
        self.pool.release([block.id for block in some])
        for block in some:
            block.count -= 1
            self.time += 1
            if not block.count:
                block.freed = self.time

    @precondition(lambda self: self.used())
    @rule(data=st.data(), block_hash=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def cache(self, data, block_hash):
        block = data.draw(st.sampled_from(self.used()))
        self.pool.cache([block.id], [block_hash])
        taken = any(other.hash == block_hash for other in self.blocks.values())
        if block.hash is None and not taken:
            block.hash = block_hash

    @rule(block_hash=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def find_and_reference(self, block_hash):
        expected = [block for block in self.blocks.values() if block.hash == block_hash]
        found = self.pool.lookup(block_hash)
        assert ([found] if found is not None else []) == [block.id for block in expected]
        if found is not None:
            self.pool.reference([found])
            self.blocks[found].count += 1

    @rule(block_id=st.integers(1, NUM_BLOCKS - 1))
    def forget(self, block_id):
        self.pool.forget(block_id)
        self.blocks[block_id].hash = None

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        for block in self.blocks.values():
            block.hash = None

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def release_too_often(self, data):
        block = data.draw(st.sampled_from(self.free()))
        with pytest.raises(RuntimeError, match=f"block {block.id} was released more often"):
            self.pool.release([block.id])

    @invariant()
    def counts_agree(self):
        assert self.pool.num_free == len(self.free())
        assert self.pool.num_used == len(self.used())
        assert self.pool.num_cached == sum(b.hash is not None for b in self.blocks.values())
        for block in self.blocks.values():
            assert self.pool.ref_count(block.id) == block.count
            assert self.pool.is_free(block.id) == (block.count == 0)


PoolAgainstModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
test_pool_against_model = PoolAgainstModel.TestCase


def test_the_null_block_is_never_given():
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)


def test_a_pool_needs_a_block_besides_the_null_block():
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_the_least_recently_released_goes_first_and_empty_ones_before():
    pool = BlockPool(7)
    first = pool.allocate(3)
    for block_id in first[:2]:
        pool.cache([block_id], [b"%d" % block_id])
    second = pool.allocate(2)
    for block_id in second:
        pool.cache([block_id], [b"%d" % block_id])
    pool.release(second)
    pool.release(first)
    assert set(pool.allocate(2)) == {first[2], 6}
    assert pool.allocate(4) == [*second, *first[:2]]
    assert pool.num_cached == 0


def test_a_found_block_moves_to_the_end_when_released_again():
    pool = BlockPool(3)
    one, two = pool.allocate(2)
    pool.cache([one], [b"1"])
    pool.cache([two], [b"2"])
    pool.release([one, two])
    pool.reference([one])
    pool.release([one])
    assert pool.allocate(2) == [two, one]


def test_a_free_block_that_is_forgotten_goes_before_those_worth_keeping():
    pool = BlockPool(3)
    one, two = pool.allocate(2)
    pool.cache([one], [b"1"])
    pool.cache([two], [b"2"])
    pool.release([one, two])
    pool.forget(two)
    assert pool.allocate(1) == [two]
    assert pool.lookup(b"1") == one


def test_of_two_blocks_of_equal_content_the_first_is_found():
    pool = BlockPool(3)
    one, two = pool.allocate(2)
    pool.cache([one], [b"x"])
    pool.cache([two], [b"x"])
    pool.cache([one], [b"other"])
    assert pool.lookup(b"x") == one
    assert pool.lookup(b"other") is None
    pool.release([one, two])
    assert pool.allocate(1) == [two]
    assert pool.lookup(b"x") == one
