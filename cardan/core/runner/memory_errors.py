"""Says in the user's words what does not fit into memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cardan.core.interfaces.errors import OutOfMemoryError
from cardan.core.runner.rehearsal import StepLimits
from cardan.core.types.model import ModelSummary
from cardan.core.types.step import SchedulerOutput

REMEDIES = (
    "Remedies: lower --max-num-batched-tokens, --max-num-seqs or --max-model-len, raise "
    "--memory-utilization, free memory, or choose a smaller model or --dtype"
)
# Of a step that had room when the engine started: something else has taken the memory since.
_STEP_REMEDIES = (
    "Remedies: lower --memory-utilization or --kv-cache-memory-bytes, so that more is left for "
    "steps, or --max-num-batched-tokens or --max-num-seqs, or end what else uses the device"
)


@contextmanager
def weights_fit(model: ModelSummary, device: torch.device) -> Iterator[None]:
    """
    Raises:
        OutOfMemoryError: instead of what the allocator raised.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_refusal(error):
            raise
        raise OutOfMemoryError(
            f"the weights of {model.architecture} ({model.num_layers} layers, hidden size "
            f"{model.hidden_size}) do not fit into the memory of {device}; free memory, or "
            "choose a smaller model or --dtype"
        ) from error


@contextmanager
def largest_step_fits(limits: StepLimits) -> Iterator[None]:
    """
    Raises:
        OutOfMemoryError: instead of what the allocator raised.
    """
    try:
        yield
    except (OutOfMemoryError, MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemoryError(
            f"{limits} does not fit into the memory that the weights leave ({error}). {REMEDIES}"
        ) from error


@contextmanager
def step_fits(step: SchedulerOutput) -> Iterator[None]:
    """
    Raises:
        OutOfMemoryError: instead of what the allocator raised; the device is as it was.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_refusal(error):
            raise
        said = str(error).partition("\n")[0]
        raise OutOfMemoryError(
            f"a step of {step.num_tokens} tokens and {len(step.rows)} sequences does not fit into "
            f"the memory that is left ({said}). {_STEP_REMEDIES}"
        ) from error


@contextmanager
def rebinding_fits(device: torch.device, undo: Callable[[], None]) -> Iterator[None]:
    """``undo`` drops what was made until an error came.

    Raises:
        OutOfMemoryError: instead of what the allocator raised.
    """
    try:
        yield
    except Exception as error:
        undo()
        if not (isinstance(error, RuntimeError | MemoryError) and _is_refusal(error)):
            raise
        said = str(error).partition("\n")[0]
        raise OutOfMemoryError(
            f"what steps use does not fit into the memory of {device} now ({said}); end what took "
            "it meanwhile and wake the engine again"
        ) from error


def _is_refusal(error: RuntimeError | MemoryError) -> bool:
    """Whether an allocator found no memory; torch's on the host raises a plain RuntimeError."""
    refused = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return refused or "allocate memory" in str(error)
