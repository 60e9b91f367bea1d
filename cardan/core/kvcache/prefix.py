"""Names of cached blocks: a chain of hashes over tokens and everything else that shapes the KV.

A block's hash covers its parent's hash, its tokens and the media that overlap it; the chain starts
from a root that covers the salt and the adapter. Every part is written as tag, length, bytes, so
that no value of one domain can be read as another.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cardan.core.types.request import MediaSpan

_VERSION = b"cardan-kv-1"
_TOKEN = np.dtype("<i4")


def _bytes(text: str) -> bytes:
    # Callers choose these texts; lone surrogates must not break the chain.
    return text.encode("utf-8", "surrogatepass")


def _part(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(8, "little") + value


# What ``_part`` puts before a parent's hash, and before the length of a block's tokens.
_PARENT_TAG = _part(b"P", bytes(hashlib.sha256().digest_size))[: -hashlib.sha256().digest_size]
_TOKENS_TAG = b"T"


def root_hash(cache_salt: str | None, adapter: str | None) -> bytes:
    """Start of a chain. Requests with different salts or adapters share no block."""
    parts = [_part(b"V", _VERSION)]
    if cache_salt is not None:
        parts.append(_part(b"S", _bytes(cache_salt)))
    if adapter is not None:
        parts.append(_part(b"A", _bytes(adapter)))
    return hashlib.sha256(b"".join(parts)).digest()


def extend_chain(
    hashes: list[bytes],
    root: bytes,
    token_ids: npt.NDArray[np.int32],
    block_size: int,
    num_blocks: int,
    media: Sequence[MediaSpan] = (),
) -> None:
    """Append to ``hashes`` until it names the first ``num_blocks`` blocks of ``token_ids``."""
    first = len(hashes)
    if first >= num_blocks:
        return
    parent = hashes[-1] if hashes else root
    num_bytes = _TOKEN.itemsize * block_size
    tokens = token_ids[first * block_size : num_blocks * block_size]
    data = (tokens if tokens.dtype == _TOKEN else tokens.astype(_TOKEN)).tobytes()
    before_tokens = _TOKENS_TAG + num_bytes.to_bytes(8, "little")
    for index in range(first, num_blocks):
        start = (index - first) * num_bytes
        name = _PARENT_TAG + parent + before_tokens + data[start : start + num_bytes]
        if media:
            begin, end = index * block_size, (index + 1) * block_size
            shown = [_media_part(span, begin) for span in media if _overlaps(span, begin, end)]
            name += b"".join(shown)
        parent = hashlib.sha256(name).digest()
        hashes.append(parent)


def _overlaps(span: MediaSpan, start: int, stop: int) -> bool:
    return span.offset < stop and span.offset + span.length > start


def _media_part(span: MediaSpan, block_start: int) -> bytes:
    # Where in its block the item begins matters: the same item shifted has other positions.
    place = f"{span.offset - block_start}:{span.length}".encode()
    return _part(b"M", _part(b"O", place) + _part(b"K", _bytes(span.key)))
