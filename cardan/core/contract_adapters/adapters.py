"""All adapters there are, and their use. Each goes when the contract's version reaches its end."""

from dataclasses import dataclass

from cardan.core.contract_adapters.added_argument import AddedArgument
from cardan.core.interfaces.platform import Platform
from cardan.core.interfaces.version import (
    ADAPTED_CONTRACTS,
    CONTRACT_VERSION,
    version_text,
)

# The contract that refuses what states 0.1.
END_OF_0_1 = (1, 2)

ADAPTERS: tuple[AddedArgument, ...] = (
    AddedArgument(
        interface=Platform,
        member="executor",
        argument="parts",
        since=(1, 0),
        removed_in=END_OF_0_1,
        loss="its executor cannot build on the engine's own parts",
    ),
)


@dataclass(frozen=True, slots=True)
class Adapted:
    """A plugin's object as this contract wants it, and what its author is to be told."""

    loaded: object
    notices: tuple[str, ...] = ()


def adapt(loaded: object, written_against: tuple[int, int]) -> Adapted:
    """``loaded``, of a contract that ``contract_refusal`` accepts, in the form of this one."""
    notices = []
    for adapter in ADAPTERS:
        is_older = written_against < adapter.since
        if is_older and isinstance(loaded, type) and adapter.fits(loaded):
            loaded = adapter.adapt(loaded)
            notices.append(adapter.notice())
    if written_against in ADAPTED_CONTRACTS:
        ours = version_text(CONTRACT_VERSION)
        notices.append(
            f"set contract = {CONTRACT_VERSION} once it keeps contract {ours}: contract "
            f"{version_text(END_OF_0_1)} refuses {version_text(written_against)}"
        )
    return Adapted(loaded, tuple(notices))
