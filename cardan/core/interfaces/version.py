"""The contract's version and the rules for changing it.

A platform or plugin states the ``(major, minor)`` it was written against. The same major and a
minor not newer than ours is accepted. A change of any public signature under
``cardan.core.interfaces`` changes the signature hash in ``contract.sha256``; ``scripts/contract``
rewrites it after the version below was raised: the minor one for additions with defaults, the
major one for anything else. While the major is 0, a minor may also break.
"""

CONTRACT_VERSION: tuple[int, int] = (0, 1)

# One evolving interface must not invalidate the rest: each has a revision of its own.
REVISIONS: dict[str, int] = {
    "platform": 1,
    "device": 1,
    "memory": 1,
    "attention": 1,
    "communication": 1,
    "kv_transport": 1,
    "kernels": 1,
    "graphs": 1,
    "executor": 1,
    "model": 1,
    "quantization": 1,
    "scheduling": 1,
    "logits": 1,
    "hooks": 1,
}


def contract_refusal(written_against: object) -> str | None:
    """Why a plugin for contract ``written_against`` cannot be used here, or None if it can."""
    if (
        not isinstance(written_against, tuple)
        or len(written_against) != 2
        or not all(isinstance(part, int) for part in written_against)
    ):
        return f"contract must be a pair of integers, got {written_against!r}"
    major, minor = written_against
    ours_major, ours_minor = CONTRACT_VERSION
    theirs, ours = f"{major}.{minor}", f"{ours_major}.{ours_minor}"
    if major != ours_major or (major == 0 and minor != ours_minor):
        return f"written for contract {theirs}, this cardan has {ours}; install matching versions"
    if minor > ours_minor:
        return f"needs contract {theirs}, this cardan has {ours}; upgrade cardan"
    return None
