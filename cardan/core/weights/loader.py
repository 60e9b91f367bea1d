"""Fills a model's weight slots from a checkpoint."""

import re
from collections.abc import Callable, Sequence

from cardan.core.interfaces.errors import WeightsError
from cardan.core.interfaces.model import CausalLM, WeightSlot
from cardan.core.types.errors import shown
from cardan.core.weights.checkpoint import Checkpoint

# Problems of one kind that a message lists.
_MAX_LISTED = 10
# Bytes of files that are read before their pages are let go, so that what was copied or packed
# does not count twice for long.
_PAGES_BYTES = 64 << 20


def load_weights(
    model: CausalLM, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None
) -> int:
    """Load every slot of ``model`` and call its ``finish_loading``.

    Names and shapes are checked before the first tensor is read. Each tensor is handed out as it
    is stored (a view of the mapped file where that is possible): as blocks if it is in blocks that
    its slot takes, else in full precision, to be copied, cast and moved by its slot in one go,
    straight into the model's storage. Values are not looked at.

    Args:
        model: as constructed, on its device.
        checkpoint: its tensors.
        progress: called after each tensor with the numbers of tensors loaded and to load.

    Returns:
        Bytes of the tensors read, as ``checkpoint`` hands them out.

    Raises:
        WeightsError: tensors are missing, unknown or of the wrong shape; the message lists them.
    """
    names = checkpoint.names()
    slots = list(model.weight_slots())
    present = [slot for slot in slots if slot.name in names]
    problems = [
        *_missing(slots, names),
        *_misshapen(present, checkpoint),
        *_unknown(model, slots, checkpoint),
    ]
    if problems:
        raise WeightsError(
            "the checkpoint does not fit the model; check that config.json and the weights belong "
            "together: " + "; ".join(problems)
        )
    num_bytes = released = 0
    for done, slot in enumerate(present, start=1):
        num_bytes += _load_slot(slot, checkpoint)
        if num_bytes - released >= _PAGES_BYTES:
            checkpoint.release_pages()
            released = num_bytes
        if progress is not None:
            progress(done, len(present))
    model.finish_loading()
    checkpoint.release_pages()
    return num_bytes


def _load_slot(slot: WeightSlot, checkpoint: Checkpoint) -> int:
    """Fill one slot; the bytes that it was given."""
    if slot.load_stored is not None:
        blocks = checkpoint.stored(slot.name)
        if blocks is not None and slot.load_stored(blocks):
            return blocks.data.nbytes
    tensor = checkpoint.tensor(slot.name)
    slot.load(tensor)
    return tensor.nbytes


def _missing(slots: Sequence[WeightSlot], names: frozenset[str]) -> list[str]:
    missing = [
        f"{slot.name} {list(slot.shape)}"
        for slot in slots
        if slot.name not in names and not slot.optional
    ]
    return _listed("missing tensors", missing)


def _misshapen(slots: Sequence[WeightSlot], checkpoint: Checkpoint) -> list[str]:
    found = [(slot, checkpoint.shape(slot.name)) for slot in slots]
    wrong = [
        f"{slot.name} in {checkpoint.describe(slot.name)} is {list(shape)}, "
        f"the model needs {list(slot.shape)}"
        for slot, shape in found
        if shape != slot.shape
    ]
    return _listed("tensors of the wrong shape", wrong)


def _unknown(model: CausalLM, slots: Sequence[WeightSlot], checkpoint: Checkpoint) -> list[str]:
    ignored = [re.compile(pattern) for pattern in model.ignored_weights]
    spare = checkpoint.names().difference(slot.name for slot in slots)
    unknown = [
        f"{shown(name)} {list(checkpoint.shape(name))} in {checkpoint.describe(name)}"
        for name in sorted(spare)
        if not any(pattern.fullmatch(name) for pattern in ignored)
    ]
    return _listed("tensors that the model has no place for", unknown)


def _listed(what: str, items: list[str]) -> list[str]:
    """At most one sentence that counts the items and lists the first ones."""
    if not items:
        return []
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return [f"{len(items)} {what}: {', '.join(items[:_MAX_LISTED])}{more}"]
