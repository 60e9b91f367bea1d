"""The contract's version and the rules for changing it.

A platform or plugin states the ``(major, minor)`` it was written against. Our own version is used
as it is; so is an older minor of the same major. One of ``ADAPTED_CONTRACTS`` is adapted
(``cardan.core.contract_adapters``) with a warning that says what to change and until when. Any
other is refused.

A change of any public signature under ``cardan.core.interfaces`` changes the hash of its interface
in ``contract.sha256``; ``scripts/contract`` rewrites it after the version below was raised (the
minor one for additions with defaults, the major one for anything else) and the interface's
revision with it. The policy and its reasons are in docs/adr/0007.
"""

from typing import Literal

CONTRACT_VERSION: tuple[int, int] = (1, 0)
# A candidate may still change where a fault leaves no other way; plugins written for it state the
# version without its stage and go on as they are when the stage becomes "final".
CONTRACT_STAGE: Literal["rc", "final"] = "rc"
# Former contracts for which there are adapters.
ADAPTED_CONTRACTS: tuple[tuple[int, int], ...] = ((0, 1),)

# One evolving interface must not invalidate the rest: each has a revision of its own, which rises
# with every change of its signatures.
REVISIONS: dict[str, int] = {
    "attention": 1,
    "capabilities": 2,  # float64
    "communication": 1,
    "constraints": 1,
    "device": 1,
    "errors": 1,
    "executor": 3,  # ModelParts and its load_weights
    "gguf": 1,
    "graphs": 1,
    "hooks": 1,
    "kernels": 1,
    "kv_transport": 1,
    "logits": 1,
    "memory": 1,
    "model": 1,
    "platform": 2,  # executor() takes parts
    "quantization": 3,  # checkpoints of a scheme's own, apply_float32
    "random_stream": 1,
    "roofline": 1,
    "scheduling": 1,
    "tool_parsing": 1,
}


def contract_name() -> str:
    """The contract's version for people: ``1.0-rc``, and ``1.0`` once it is final."""
    name = version_text(CONTRACT_VERSION)
    return name if CONTRACT_STAGE == "final" else f"{name}-{CONTRACT_STAGE}"


def version_text(version: tuple[int, int]) -> str:
    """``(1, 0)`` as ``1.0``."""
    return f"{version[0]}.{version[1]}"


def contract_refusal(written_against: object) -> str | None:
    """Why a plugin for contract ``written_against`` cannot be used here, or None if it can."""
    if (
        not isinstance(written_against, tuple)
        or len(written_against) != 2
        or not all(isinstance(part, int) for part in written_against)
    ):
        return f"contract must be a pair of integers, got {written_against!r}"
    theirs, ours = version_text(written_against), contract_name()
    if written_against > CONTRACT_VERSION:
        return f"needs contract {theirs}, this cardan has {ours}; upgrade cardan"
    if written_against[0] != CONTRACT_VERSION[0] and written_against not in ADAPTED_CONTRACTS:
        adapted = ", ".join(map(version_text, ADAPTED_CONTRACTS)) or "none"
        return (
            f"written for contract {theirs}, this cardan has {ours} (and adapts: {adapted}); "
            "upgrade the plugin"
        )
    return None
