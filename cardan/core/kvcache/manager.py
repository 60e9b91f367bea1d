"""Which blocks each sequence holds, in every KV group.

Ownership of the blocks of one sequence (``blocks[g]``, block i holds tokens
``[i * block_size, (i + 1) * block_size)``):

    [0, num_shared)              referenced; also held by others or found by hash
    [num_shared, num_registered) own, full, findable by hash
    [num_registered, len)        own, being filled

``free`` drops all references, last block first, so that the tail of a prompt is evicted before
its beginning.

Full blocks that a sequence is about to compute are *announced* under their hashes until they are
registered or the sequence is freed. Nobody reads an announced block; others may wait for it. Hashes
are made when somebody asks for them, or while the device computes (``name_announced``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cardan.core.kvcache.block_pool import BlockPool
from cardan.core.kvcache.prefix import extend_chain
from cardan.core.types.errors import ConfigError
from cardan.core.types.kv import KVCacheConfig
from cardan.core.types.request import MediaSpan


@dataclass(slots=True)
class SequenceBlocks:
    """The block tables of one sequence and the hash chain of its full blocks.

    ``announced_as`` is the key under which blocks were announced, ``awaited`` the announced block
    that the sequence was last told to wait for.
    """

    root: bytes
    media: tuple[MediaSpan, ...]
    blocks: tuple[list[int], ...]
    hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    announced_as: int | None = None
    awaited: bytes | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.blocks[0])


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Cached blocks found for a sequence; ``num_free`` of them (in one group) are free now."""

    block_ids: tuple[list[int], ...]
    num_free: int

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids[0])


class KVCacheManager:
    """Plans KV memory; moves no bytes and knows no device."""

    def __init__(self, config: KVCacheConfig, enable_prefix_caching: bool) -> None:
        for group in config.groups:
            if group.spec.kind != "full":
                raise ConfigError(f"KV groups of kind {group.spec.kind} are not supported yet")
            if group.spec.block_size != config.block_size:
                raise ConfigError("all KV groups must have the same block size")
        self.config = config
        self.block_size = config.block_size
        self.num_groups = len(config.groups)
        self.enable_prefix_caching = enable_prefix_caching
        self._pools = tuple(BlockPool(config.num_blocks) for _ in config.groups)
        self._announced: dict[bytes, int] = {}
        # Announcements without hashes yet; those of sequences freed meanwhile are void.
        self._unnamed: list[tuple[SequenceBlocks, npt.NDArray[np.int32]]] = []

    @property
    def num_free(self) -> int:
        """Blocks that every group can still give."""
        return min(pool.num_free for pool in self._pools)

    @property
    def num_used(self) -> int:
        return max(pool.num_used for pool in self._pools)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.num_used / self.config.num_usable_blocks

    @property
    def num_cached(self) -> int:
        return self._pools[0].num_cached

    @property
    def num_announced(self) -> int:
        """Blocks that running sequences are about to compute."""
        self.name_announced()
        return len(self._announced)

    def new_sequence(self, root: bytes, media: tuple[MediaSpan, ...]) -> SequenceBlocks:
        return SequenceBlocks(root, media, tuple([] for _ in self._pools))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_cached(
        self, sequence: SequenceBlocks, token_ids: npt.NDArray[np.int32]
    ) -> CachedPrefix:
        """Longest cached prefix of ``token_ids``, short of the last token: that one is computed."""
        found: tuple[list[int], ...] = tuple([] for _ in self._pools)
        if not self.enable_prefix_caching:
            return CachedPrefix(found, 0)
        for block_hash in self._chain(sequence, token_ids):
            ids = [pool.lookup(block_hash) for pool in self._pools]
            if None in ids:
                break
            for group, block_id in zip(found, ids, strict=True):
                group.append(block_id)  # type: ignore[arg-type]  # None was excluded above
        free = max(
            sum(pool.is_free(block_id) for block_id in group)
            for pool, group in zip(self._pools, found, strict=True)
        )
        return CachedPrefix(found, free)

    def announcer_of_next(
        self, sequence: SequenceBlocks, token_ids: npt.NDArray[np.int32]
    ) -> int | None:
        """Who is about to compute the first block that ``find_cached`` does not find, if anybody.

        The answer is the key given to ``announce``.
        """
        self.name_announced()
        if not self._announced:
            return None
        if sequence.awaited is not None:
            # Not looked for again, although a block before it may have been forgotten meanwhile.
            announcer = self._announced.get(sequence.awaited)
            if announcer is not None:
                return announcer
        sequence.awaited = None
        for block_hash in self._chain(sequence, token_ids):
            if any(pool.lookup(block_hash) is None for pool in self._pools):
                announcer = self._announced.get(block_hash)
                sequence.awaited = None if announcer is None else block_hash
                return announcer
        return None

    def announce(
        self, sequence: SequenceBlocks, token_ids: npt.NDArray[np.int32], key: int
    ) -> None:
        """Tell others that ``sequence`` is about to compute the full blocks of ``token_ids``."""
        if not self.enable_prefix_caching:
            return
        sequence.announced_as = key
        self._unnamed.append((sequence, token_ids))

    def name_announced(self) -> None:
        """Make the hashes of what was announced since the last call: a microsecond a block, so it
        is for when the device has work."""
        unnamed, self._unnamed = self._unnamed, []
        for sequence, token_ids in unnamed:
            key = sequence.announced_as
            if key is None:
                continue
            num_full = len(token_ids) // self.block_size
            self._name(sequence, token_ids, num_full)
            for block_hash in sequence.hashes[sequence.num_registered : num_full]:
                self._announced.setdefault(block_hash, key)

    def attach(self, sequence: SequenceBlocks, prefix: CachedPrefix) -> None:
        """Give an empty sequence a reference to each block of ``prefix``."""
        for pool, blocks, ids in zip(self._pools, sequence.blocks, prefix.block_ids, strict=True):
            pool.reference(ids)
            blocks.extend(ids)
        sequence.num_registered = prefix.num_blocks

    def extend(self, sequence: SequenceBlocks, num_tokens: int) -> tuple[list[int], ...] | None:
        """Allocate until ``num_tokens`` fit; the new ids of each group, or None if they lack."""
        count = max(self.blocks_for(num_tokens) - sequence.num_blocks, 0)
        return self.grow([sequence], [count])

    def grow(
        self, sequences: Sequence[SequenceBlocks], counts: Sequence[int]
    ) -> tuple[list[int], ...] | None:
        """Allocate ``counts[i]`` more blocks for each sequence, or nothing if blocks lack.

        Returns the new ids of each group, those of the first sequence first.
        """
        total = sum(counts)
        if total > self.num_free:
            return None
        added = tuple([pool.allocate(total) for pool in self._pools])
        for group, ids in enumerate(added):
            start = 0
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.blocks[group].extend(ids[start : start + count])
                start += count
        return added

    def fork(
        self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int
    ) -> tuple[list[tuple[int, int]], ...] | None:
        """Let an empty ``child`` start after the parent's first ``num_tokens`` tokens.

        Full blocks are shared; a block that is partly within is copied, since the child writes to
        it at once. Returns the copies (source, target) of each group, or None if a block lacks.
        """
        num_shared, rest = divmod(num_tokens, self.block_size)
        if rest and self.num_free < 1:
            return None
        copies: list[list[tuple[int, int]]] = []
        for pool, ours, theirs in zip(self._pools, child.blocks, parent.blocks, strict=True):
            shared = theirs[:num_shared]
            pool.reference(shared)
            ours.extend(shared)
            copies.append([])
            if rest:
                [target] = pool.allocate(1)
                ours.append(target)
                copies[-1].append((theirs[num_shared], target))
        # The child may have begun its chain in a search for a cached prefix.
        child.hashes[:] = parent.hashes[:num_shared]
        child.num_registered = min(num_shared, parent.num_registered)
        return tuple(copies)

    def register(
        self, sequence: SequenceBlocks, token_ids: npt.NDArray[np.int32], num_computed: int
    ) -> None:
        """Make the blocks that are full after ``num_computed`` tokens findable."""
        num_full = num_computed // self.block_size
        if not self.enable_prefix_caching:
            sequence.num_registered = num_full
            return
        self._name(sequence, token_ids, num_full)
        first = sequence.num_registered
        hashes = sequence.hashes[first:num_full]
        for pool, blocks in zip(self._pools, sequence.blocks, strict=True):
            pool.cache(blocks[first:num_full], hashes)
        self._withdraw(sequence, hashes)
        sequence.num_registered = max(num_full, sequence.num_registered)

    def free(self, sequence: SequenceBlocks, forget: bool = False) -> None:
        """Drop everything a sequence holds. ``forget``: its content is bad, let nobody find it."""
        for pool, blocks in zip(self._pools, sequence.blocks, strict=True):
            if forget:
                for block_id in blocks:
                    pool.forget(block_id)
            pool.release(blocks[::-1])
            blocks.clear()
        if sequence.announced_as is not None:
            self._withdraw(sequence, sequence.hashes[sequence.num_registered :])
            sequence.announced_as = None
        sequence.num_registered = 0

    def reset_prefix_cache(self) -> None:
        for pool in self._pools:
            pool.forget_all()

    def ref_counts(self, group: int, block_ids: Sequence[int]) -> list[int]:
        """Reference counts, for accounting checks."""
        return [self._pools[group].ref_count(block_id) for block_id in block_ids]

    def _chain(self, sequence: SequenceBlocks, token_ids: npt.NDArray[np.int32]) -> Iterator[bytes]:
        """Names of the full blocks of ``token_ids`` short of the last token.

        They are made in growing pieces: who finds no block needs none after the first.
        """
        count = (len(token_ids) - 1) // self.block_size
        done = 0
        while done < count:
            known = min(count, max(len(sequence.hashes), 2 * done, 1))
            self._name(sequence, token_ids, known)
            yield from sequence.hashes[done:known]
            done = known

    def _name(
        self, sequence: SequenceBlocks, token_ids: npt.NDArray[np.int32], num_blocks: int
    ) -> None:
        """Make the hashes of the first blocks of ``token_ids``, as far as they are missing."""
        extend_chain(
            sequence.hashes, sequence.root, token_ids, self.block_size, num_blocks, sequence.media
        )

    def _withdraw(self, sequence: SequenceBlocks, hashes: Sequence[bytes]) -> None:
        """What the sequence announced, of these."""
        announced, key = self._announced, sequence.announced_as
        if not announced:
            return
        for block_hash in hashes:
            if announced.get(block_hash) == key:
                announced.pop(block_hash, None)
