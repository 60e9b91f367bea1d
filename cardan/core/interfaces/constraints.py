"""Wishes about the configuration. Plugins state them; the core solves; nobody writes a config."""

from dataclasses import dataclass
from typing import Any, Literal

ConstraintOp = Literal["==", "in", "<=", ">=", "multiple_of", "forbid"]
Severity = Literal["require", "prefer"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """One demand on one setting.

    ``require`` that a user's explicit value contradicts is an error naming both; ``prefer`` only
    fills in a setting that the user left open. ``reason`` is shown to the user; ``owner`` (who
    states it) is filled in by the core.
    """

    path: str
    op: ConstraintOp
    value: Any
    reason: str
    severity: Severity = "require"
    owner: str = ""

    def allows(self, value: Any) -> bool:
        """Whether a (set) value satisfies this constraint."""
        match self.op:
            case "==":
                return bool(value == self.value)
            case "in":
                return value in self.value
            case "<=":
                return bool(value <= self.value)
            case ">=":
                return bool(value >= self.value)
            case "multiple_of":
                return bool(value % self.value == 0)
            case "forbid":
                return bool(value != self.value)
