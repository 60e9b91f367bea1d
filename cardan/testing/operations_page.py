"""The page of all operations, written from their definitions."""

import inspect
from collections.abc import Sequence

from cardan.core.interfaces.kernels import OpSpec

HEAD = """\
# Operations

What layers and the sampler call by name, and what a kernel provider may serve
([Writing a platform](writing-a-platform.md)). An operation is defined by a body in plain torch;
its arguments are the provider's, too. Attributes of use are what a provider's `Needs` may ask for.
A provider's result may differ from the body in float64 by `atol + rtol * |truth|`. This page is
written by `scripts/operations`.
"""


def operations_page(catalogue: Sequence[OpSpec]) -> str:
    """Markdown: each operation with its arguments, shapes, attributes, tolerances.

    Raises:
        ValueError: a body has no docstring.
    """
    return "\n".join([HEAD, *(_section(op) for op in sorted(catalogue, key=lambda op: op.name))])


def _section(op: OpSpec) -> str:
    text = inspect.getdoc(op.body)
    if not text:
        raise ValueError(f"the body of {op.name} has no docstring")
    facts = [f"version {op.version}"]
    arguments = _arguments(op)
    if op.mutates:
        facts.append(f"writes in place: {', '.join(f'`{arguments[i]}`' for i in op.mutates)}")
    if op.prepares is not None:
        facts.append(f"a provider may prepare `{arguments[op.prepares]}`")
    if op.parts:
        facts.append(f"made of {', '.join(f'`{part}`' for part in op.parts)}")
    rows = [
        f"| {dtype} | {tolerance.atol:g} | {tolerance.rtol:g} |"
        for dtype, tolerance in op.tolerances.items()
    ]
    return "\n".join(
        [
            f"## {op.name}",
            "",
            "```python",
            f"{op.name}{_signature(op)}",
            "```",
            "",
            _escaped(text),
            "",
            f"{'; '.join(facts)[0].upper()}{'; '.join(facts)[1:]}.",
            "",
            "| dtype | atol | rtol |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _own_parameters(op: OpSpec) -> list[inspect.Parameter]:
    """Those of a call: a composite's body is given its parts before."""
    parameters = list(inspect.signature(op.body).parameters.values())
    return parameters[1:] if op.parts else parameters


def _arguments(op: OpSpec) -> list[str]:
    return [parameter.name for parameter in _own_parameters(op)]


def _signature(op: OpSpec) -> str:
    whole = inspect.signature(op.body)
    text = str(whole.replace(parameters=_own_parameters(op)))
    return text.replace("torch.Tensor", "Tensor").replace("torch._tensor.Tensor", "Tensor")


def _escaped(text: str) -> str:
    """A docstring as Markdown: its code marks are doubled, and `<` begins no tag."""
    return text.replace("``", "`").replace("<", "&lt;")
