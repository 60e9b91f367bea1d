"""Reading option values: counts, byte sizes, JSON, ``name=value``."""

import json
import re
from decimal import Decimal
from typing import Any

import typer

# As people know it from vLLM: a small letter counts in thousands, a capital one in 1024s.
_COUNT_UNITS: dict[str, int] = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
}
_BYTE_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{
        f"{letter}{end}": 1000**power for power, letter in enumerate("kmgt", 1) for end in ("", "b")
    },
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_count(value: str | int) -> int:
    """``2048``, ``32k`` (32000), ``32K`` (32768), ``1.5M``."""
    return _scaled(value, _COUNT_UNITS, "a count such as 2048, 32k (32000) or 32K (32768)")


def parse_model_len(value: str | int) -> int:
    """A count as above, or ``auto`` (also -1), which gives 0: the model's own limit."""
    if str(value).strip().lower() in ("auto", "-1"):
        return 0
    count = parse_count(value)
    if count == 0:
        raise typer.BadParameter("must be at least 1, or auto")
    return count


def parse_bytes(value: str | int) -> int:
    """``1073741824``, ``500M`` or ``500MB`` (millions), ``2GiB`` (1024s)."""
    text = str(value)
    match = _NUMBER.fullmatch(text)
    lowered = f"{match[1]}{match[2].lower()}" if match else text
    return _scaled(lowered, _BYTE_UNITS, "a size such as 500M, 2GB or 2GiB", text)


def parse_json_object(value: str | dict[str, Any]) -> dict[str, Any]:
    """A JSON object, as text or (from a configuration file) as such."""
    if isinstance(value, dict):
        return value
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise typer.BadParameter(f"not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise typer.BadParameter(f"must be a JSON object, got {value}")
    return parsed


def parse_assignments(values: list[str] | None) -> dict[str, str]:
    """``name=value`` items as a mapping."""
    assigned: dict[str, str] = {}
    for item in values or ():
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{item!r} is not NAME=VALUE")
        assigned[name] = value
    return assigned


def _scaled(value: str | int, units: dict[str, int], wanted: str, shown: str | None = None) -> int:
    text = str(value)
    match = _NUMBER.fullmatch(text)
    unit = units.get(match[2]) if match else None
    if match is None or unit is None:
        raise typer.BadParameter(f"{shown or text!r} is not {wanted}")
    number = Decimal(match[1]) * unit
    if number != int(number):
        raise typer.BadParameter(f"{shown or text!r} is not a whole number")
    return int(number)
