"""Fills a model's weight slots from a checkpoint."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cardan.core.interfaces.errors import WeightsError
from cardan.core.interfaces.model import CausalLM, WeightSlot
from cardan.core.interfaces.quantization import QuantScheme
from cardan.core.types.errors import shown
from cardan.core.weights.checkpoint import Checkpoint

# Problems of one kind that a message lists.
_MAX_LISTED = 10
# Bytes of files that are read before their pages are let go, so that what was copied or packed
# does not count twice for long.
_PAGES_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Source:
    """What fills a slot: ``tensors`` of the checkpoint with their shapes, which ``scheme`` puts
    together (None: a single one, of the slot's own name)."""

    slot: WeightSlot
    tensors: Mapping[str, tuple[int, ...]]
    scheme: QuantScheme | None = None


def load_weights(
    model: CausalLM,
    checkpoint: Checkpoint,
    progress: Callable[[int, int], None] | None = None,
    scheme: QuantScheme | None = None,
) -> int:
    """Load every slot of ``model`` and call its ``finish_loading``.

    Names and shapes are checked before the first tensor is read. Each tensor is handed out as it
    is stored (a view of the mapped file where that is possible): as blocks if it is in blocks that
    its slot takes, else in full precision, to be copied, cast and moved by its slot in one go,
    straight into the model's storage. Values are not looked at.

    Args:
        model: as constructed, on its device.
        checkpoint: its tensors.
        progress: called after each slot with the numbers of slots loaded and to load.
        scheme: the model's, whose checkpoints may store matrices in tensors of their own.

    Returns:
        Bytes of the tensors read, as ``checkpoint`` hands them out.

    Raises:
        WeightsError: tensors are missing, unknown or of the wrong shape; the message lists them.
    """
    names = checkpoint.names()
    sources = [_source(slot, names, scheme) for slot in model.weight_slots()]
    present = [source for source in sources if names.issuperset(source.tensors)]
    problems = [
        *_missing(sources, names),
        *_misshapen(present, checkpoint),
        *_unknown(model, sources, checkpoint),
    ]
    if problems:
        raise WeightsError(
            "the checkpoint does not fit the model; check that config.json and the weights belong "
            "together: " + "; ".join(problems)
        )
    num_bytes = released = 0
    for done, source in enumerate(present, start=1):
        num_bytes += _load(source, checkpoint)
        if num_bytes - released >= _PAGES_BYTES:
            checkpoint.release_pages()
            released = num_bytes
        if progress is not None:
            progress(done, len(present))
    model.finish_loading()
    checkpoint.release_pages()
    return num_bytes


def _source(slot: WeightSlot, names: frozenset[str], scheme: QuantScheme | None) -> _Source:
    if scheme is not None and slot.name not in names:
        tensors = scheme.tensors_of(slot.name, slot.shape)
        if tensors:
            return _Source(slot, tensors, scheme)
    return _Source(slot, {slot.name: slot.shape})


def _load(source: _Source, checkpoint: Checkpoint) -> int:
    """Fill one slot; the bytes that it was given."""
    slot = source.slot
    if source.scheme is not None:
        tensors = {name: checkpoint.tensor(name) for name in source.tensors}
        made = source.scheme.assemble(slot.name, slot.shape, tensors)
        if slot.load_stored is None or not slot.load_stored(made):
            slot.load(made.decoded())
        return sum(tensor.nbytes for tensor in tensors.values())
    if slot.load_stored is not None:
        blocks = checkpoint.stored(slot.name)
        if blocks is not None and slot.load_stored(blocks):
            return blocks.data.nbytes
    tensor = checkpoint.tensor(slot.name)
    slot.load(tensor)
    return tensor.nbytes


def _missing(sources: Sequence[_Source], names: frozenset[str]) -> list[str]:
    missing = [
        f"{name} {list(shape)}"
        for source in sources
        for name, shape in source.tensors.items()
        if name not in names and not source.slot.optional
    ]
    return _listed("missing tensors", missing)


def _misshapen(sources: Sequence[_Source], checkpoint: Checkpoint) -> list[str]:
    found = [
        (name, shape, checkpoint.shape(name))
        for source in sources
        for name, shape in source.tensors.items()
    ]
    wrong = [
        f"{name} in {checkpoint.describe(name)} is {list(given)}, the model needs {list(shape)}"
        for name, shape, given in found
        if given != shape
    ]
    return _listed("tensors of the wrong shape", wrong)


def _unknown(model: CausalLM, sources: Sequence[_Source], checkpoint: Checkpoint) -> list[str]:
    ignored = [re.compile(pattern) for pattern in model.ignored_weights]
    spare = checkpoint.names().difference(*(source.tensors for source in sources))
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
