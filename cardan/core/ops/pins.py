"""A user's choices among kernel providers: ``op=provider``, ``-provider``, ``-op``."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.kernels import REFERENCE


@dataclass(frozen=True, slots=True)
class Pins:
    """Parsed choices: the one provider wanted for an op, and what is vetoed.

    A vetoed op is served by its reference; a vetoed provider serves no op.
    """

    wanted: dict[str, str]
    vetoed_ops: frozenset[str]
    vetoed_providers: frozenset[str]


def parse_pins(
    pins: Sequence[str], ops: Collection[str], providers: Collection[tuple[str, str]]
) -> Pins:
    """Parse ``pins`` against the known ``ops`` and the ``(op, provider)`` pairs.

    Raises:
        ConfigError: an unknown name (with the nearest known one), or two pins for one op.
    """
    names = sorted({name for _, name in providers})
    wanted: dict[str, str] = {}
    vetoed_ops: set[str] = set()
    vetoed_providers: set[str] = set()
    for pin in pins:
        op, equals, provider = pin.partition("=")
        if pin.startswith("-") and not equals:
            name = pin[1:]
            if name in ops:
                vetoed_ops.add(name)
            elif name in names:
                vetoed_providers.add(name)
            else:
                _unknown(pin, "op or provider", name, [*ops, *names])
        elif equals:
            if op not in ops:
                _unknown(pin, "op", op, ops)
            candidates = [REFERENCE, *(name for of, name in providers if of == op)]
            if provider not in candidates:
                _unknown(pin, f"provider of {op}", provider, candidates)
            if wanted.setdefault(op, provider) != provider:
                raise ConfigError(f"device.kernels pins {op} to {wanted[op]} and to {provider}")
        else:
            raise ConfigError(f"device.kernels {pin!r} is neither op=provider, -provider nor -op")
    return Pins(wanted, frozenset(vetoed_ops), frozenset(vetoed_providers))


def nearest(name: str, known: Collection[str]) -> str:
    """A hint at the known name nearest to ``name``, or the list of all if none is near."""
    close = get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"there are: {', '.join(sorted(known))}"


def _unknown(pin: str, what: str, name: str, known: Collection[str]) -> NoReturn:
    raise ConfigError(f"device.kernels {pin!r}: no {what} named {name!r}; {nearest(name, known)}")
