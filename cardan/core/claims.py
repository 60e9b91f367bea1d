"""Which platform holds what a process has only once."""

import threading
from collections import Counter
from collections.abc import Iterable

from cardan.core.interfaces.errors import ConfigError


class ClaimLedger:
    """Platforms' claims on exclusive resources, such as ``torch.privateuse1``.

    A platform holds a claim as often as it took it and until it gave all of them back. Threads may
    share a ledger.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Claim -> its holder's name, once for each time it was taken.
        self._holders: dict[str, Counter[str]] = {}

    def take(self, platform: str, claims: Iterable[str]) -> None:
        """Take all of ``claims`` or none.

        Raises:
            ConfigError: another platform holds one of them.
        """
        wanted = sorted(claims)
        with self._lock:
            for claim in wanted:
                for owner in self._holders.get(claim, ()):
                    if owner != platform:
                        raise ConfigError(_collision(owner, platform, claim))
            for claim in wanted:
                self._holders.setdefault(claim, Counter())[platform] += 1

    def give_back(self, platform: str, claims: Iterable[str]) -> None:
        """Undo one ``take``."""
        with self._lock:
            for claim in claims:
                holders = self._holders[claim]
                holders[platform] -= 1
                if not holders[platform]:
                    del self._holders[claim]


def _collision(owner: str, platform: str, claim: str) -> str:
    return (
        f"platforms {owner} and {platform} both claim {claim}, so only one of them can be open in "
        "a process; run the other one in a process of its own"
    )


# What is claimed belongs to the process, so its runtimes share this one.
PROCESS_CLAIMS = ClaimLedger()
