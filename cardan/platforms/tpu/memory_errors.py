"""What the runtime says when something does not fit, in words that help."""

from collections.abc import Iterator
from contextlib import contextmanager

from jax.errors import JaxRuntimeError

from cardan.core.interfaces.errors import OutOfMemoryError

_REMEDIES = (
    "lower --max-num-batched-tokens, --max-num-seqs, --max-model-len or --memory-utilization"
)


@contextmanager
def steps_fit(what: str) -> Iterator[None]:
    """Turns a full device into an error of the contract that says so of ``what``."""
    try:
        yield
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).splitlines()[0]
        raise OutOfMemoryError(f"{what} did not fit: {first}; {_REMEDIES}") from error


@contextmanager
def steps_compile() -> Iterator[None]:
    """Turns a compiler's refusal, which is nearly always of memory on the chip, into the error that
    ends the sequences of one step: a rare kind of step must not end the engine."""
    try:
        with steps_fit("a step"):
            yield
    except JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        raise OutOfMemoryError(f"a step could not be compiled: {first}; {_REMEDIES}") from error
