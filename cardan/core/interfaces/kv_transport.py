"""KV blocks between pools of any two devices, through one canonical layout.

Canonical bytes of a block: ``[layer, kv, head, token, content]``, contiguous, in the spec's dtype.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cardan.core.interfaces.memory import KVPool

TransferState = Literal["pending", "done", "failed"]


@dataclass(frozen=True, slots=True)
class TransferStatus:
    state: TransferState
    reason: str | None = None


class KVTransport(ABC):
    """Moves blocks; which blocks and when is a connector's policy."""

    @abstractmethod
    def export(self, pool: KVPool) -> bytes:
        """A handle that a peer's transport can read from and write to."""

    @abstractmethod
    def read(self, handle: bytes, pool: KVPool, pairs: Sequence[tuple[int, int]]) -> int:
        """Start copying remote blocks into ``pool``; pairs: remote id, local id. Gives a ticket."""

    @abstractmethod
    def write(self, handle: bytes, pool: KVPool, pairs: Sequence[tuple[int, int]]) -> int:
        """Start copying blocks of ``pool`` to the peer; pairs: local id, remote id."""

    @abstractmethod
    def poll(self, tickets: Sequence[int]) -> Sequence[TransferStatus]: ...

    @abstractmethod
    def close(self) -> None: ...
