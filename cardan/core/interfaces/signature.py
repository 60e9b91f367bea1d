"""The contract's signature: hashes over all that a plugin may call, subclass or construct.

It is read from the source text, so it needs no import, does not depend on the Python version, and
does not change with comments, docstrings, private names or the bodies of functions. There is one
hash over everything, and one for each interface, which shows what changed.
"""

import ast
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cardan.core.interfaces.version import (
    REVISIONS,
    contract_name,
)

HASH_FILE = Path(__file__).parent / "contract.sha256"
# This module describes the contract and is no part of it.
_NOT_CONTRACT: frozenset[str] = frozenset({"__init__", "signature"})
# Reference parts that platforms may build on; they implement the contract.
_REFERENCE_PARTS = ("torch_", "thread_")
# Values that the committed file states in words.
_SHOWN = ("CONTRACT_VERSION", "CONTRACT_STAGE", "ADAPTED_CONTRACTS", "REVISIONS")
# Hexadecimal digits of an interface's hash: enough to tell changes apart.
_SHORT_DIGEST = 16


@dataclass(frozen=True, slots=True)
class InterfaceHash:
    """A revision of one interface and the hash of its signatures."""

    revision: int
    digest: str


@dataclass(frozen=True, slots=True)
class ContractHash:
    """A version of the contract, such as ``1.0-rc``, the hash of all its signatures, and those of
    its interfaces by name."""

    version: str
    digest: str
    interfaces: Mapping[str, InterfaceHash] = field(default_factory=dict)

    def __str__(self) -> str:
        """The form of the committed file: a line for the whole, then one for each interface."""
        lines = [f"{self.version} {self.digest}"]
        for name, item in sorted(self.interfaces.items()):
            lines.append(f"{name} {item.revision} {item.digest}")
        return "\n".join(lines)

    def unraised(self, before: "ContractHash") -> tuple[str, ...]:
        """Interfaces that differ from ``before`` under the same revision."""
        return tuple(
            name
            for name, old in sorted(before.interfaces.items())
            if (new := self.interfaces.get(name)) is not None
            and new.digest != old.digest
            and new.revision == old.revision
        )


def contract_hash(folder: Path | None = None) -> ContractHash:
    """The hash of the contract as it is in the sources (default: those that are running)."""
    lines = contract_signatures(folder)
    payload = "\n".join([contract_name(), *lines, ""])
    interfaces = {}
    for name, revision in REVISIONS.items():
        own = "\n".join(line for line in lines if line.startswith(f"{name}."))
        interfaces[name] = InterfaceHash(revision, _digest(own)[:_SHORT_DIGEST])
    return ContractHash(contract_name(), _digest(payload), interfaces)


def recorded_hash(file: Path = HASH_FILE) -> ContractHash | None:
    """The hash that was committed, or None if there is none yet."""
    if not file.exists():
        return None
    first, *others = file.read_text(encoding="utf-8").splitlines()
    version, digest = first.split()
    interfaces = {}
    for line in others:
        name, revision, own = line.split()
        interfaces[name] = InterfaceHash(int(revision), own)
    return ContractHash(version, digest, interfaces)


def contract_signatures(folder: Path | None = None) -> list[str]:
    """All public signatures, one a line, in an order that moving code does not change."""
    lines: list[str] = []
    for file in sorted((folder or Path(__file__).parent).glob("*.py")):
        if file.stem not in _NOT_CONTRACT and not file.stem.startswith(_REFERENCE_PARTS):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            members = [line for node in tree.body for line in _signatures(node, file.stem)]
            lines += sorted(members)
    return lines


def _signatures(node: ast.stmt, scope: str) -> list[str]:
    match node:
        case ast.ClassDef(name=name) if _is_public(name):
            return _class_signatures(node, scope)
        case ast.FunctionDef() | ast.AsyncFunctionDef() if _is_public(node.name):
            return [f"{scope}.{_function_signature(node)}"]
        case ast.AnnAssign(target=ast.Name(id=name)) if _is_public(name):
            return [f"{scope}.{name}: {_field_signature(node)}"]
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_public(name):
            return [f"{scope}.{name} = {ast.unparse(value)}"]
    return []


def _class_signatures(node: ast.ClassDef, scope: str) -> list[str]:
    path = f"{scope}.{node.name}"
    bases = [ast.unparse(base) for base in node.bases]
    bases += [f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords]
    lines = [f"{path}{_decorators(node)} class({', '.join(bases)})"]
    position = 0
    for member in node.body:
        for line in _signatures(member, path):
            # The order of fields is that of a dataclass's positional arguments.
            if isinstance(member, ast.AnnAssign):
                line = f"{line} #{position}"
                position += 1
            lines.append(line)
    return lines


def _function_signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = node.args
    parts: list[str] = []
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True), start=1):
        parts.append(_argument(argument, default))
        if index == len(arguments.posonlyargs):
            parts.append("/")
    if arguments.vararg is not None:
        parts.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        parts.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(_argument(argument, default))
    if arguments.kwarg is not None:
        parts.append("**" + _argument(arguments.kwarg, None))
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    result = _annotation(node.returns) if node.returns is not None else ""
    return f"{node.name}{_decorators(node)} {kind}({', '.join(parts)}) -> {result}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {_annotation(argument.annotation)}"
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _field_signature(node: ast.AnnAssign) -> str:
    text = _annotation(node.annotation)
    if node.value is None or ast.unparse(node.target) in _SHOWN:
        return text
    return f"{text} = {ast.unparse(node.value)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _annotation(node: ast.expr) -> str:
    """Source text of an annotation; quoting it makes no difference."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return ast.unparse(ast.parse(node.value, mode="eval"))
    return ast.unparse(node)


def _decorators(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return "".join(f" @{ast.unparse(item)}" for item in node.decorator_list)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))
