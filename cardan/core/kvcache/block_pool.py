"""Blocks of one KV group: who uses them, what is cached in them, which goes next."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from cardan.core.types.kv import NULL_BLOCK


class BlockPool:
    """Owner of the block ids ``1 .. num_blocks - 1`` of one group.

    A block is *used* while its reference count is positive, else *free*. A free block may still
    be *cached*: it keeps its content, can be found by its hash, and is used again by
    ``reference``. Free blocks are taken front first: those with no content worth keeping stand
    before the cached ones, and these in the order in which they were released.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs the null block and at least one more")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one reference; their old content is forgotten.

        The caller has checked ``num_free``; asking for more is a defect.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} are free")
        take, counts, hashes = self._free.popitem, self._ref_counts, self._hashes
        block_ids = []
        for _ in range(count):
            block_id, _nothing = take(last=False)
            counts[block_id] = 1
            if hashes[block_id] is not None:
                self.forget(block_id)
            block_ids.append(block_id)
        return block_ids

    def reference(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, taking cached ones out of the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each; the last one listed is the last to be evicted."""
        for block_id in block_ids:
            count = self._ref_counts[block_id] - 1
            if count < 0:
                raise RuntimeError(f"block {block_id} was released more often than referenced")
            self._ref_counts[block_id] = count
            if count == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds the content named by ``block_hash``, used or free."""
        return self._cached.get(block_hash)

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def cache(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Make full blocks findable. Of two blocks of equal content the first stays findable."""
        hashes, cached = self._hashes, self._cached
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if hashes[block_id] is None and block_hash not in cached:
                hashes[block_id] = block_hash
                cached[block_hash] = block_id

    def forget(self, block_id: int) -> None:
        """Make a block unfindable; whoever references it keeps it, a free one goes next."""
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            self._hashes[block_id] = None
            del self._cached[block_hash]
            if self.is_free(block_id):
                self._free.move_to_end(block_id, last=False)

    def forget_all(self) -> None:
        """Empty the prefix cache; used blocks stay with their users."""
        for block_id in list(self._cached.values()):
            self.forget(block_id)
