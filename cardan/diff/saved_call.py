"""One call on disk: ``call.json`` says what it is, ``tensors.pt`` has its arguments.

``tensors.pt`` is read by ``torch.load(..., weights_only=True)``: a mapping from names to tensors on
the host. A weight stands there as it was loaded, before a provider brought it into its own form.
"""

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.attention import HeadRotation, LayerParams
from cardan.core.types.errors import ConfigError
from cardan.core.types.kv import KVCacheSpec
from cardan.diff.recorder import ATTENTION, ROTATE
from cardan.diff.run import DiffResult, FaultyCall
from cardan.diff.truth import host

_FORMAT = 1
_CALL, _TENSORS = "call.json", "tensors.pt"
_ROTATION = ("cos_sin", "q_weight", "k_weight")


@dataclass(frozen=True, slots=True)
class SavedCall:
    """What ``call.json`` says, and the tensors.

    ``facts`` tell where the call comes from. ``args`` has an entry for each argument of an
    operation: the name of a tensor under ``tensor``, or a ``value``. A call of an attention backend
    has ``kv`` instead, and in ``numbers`` the constants of its layer or rotation.
    """

    op: str
    provider: str
    attributes: Mapping[str, Any]
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    args: tuple[Mapping[str, Any], ...] = ()
    kv: KVCacheSpec | None = None
    numbers: Mapping[str, Any] | None = None


def save_call(result: DiffResult, call: FaultyCall, directory: Path) -> None:
    """Write the call into ``directory``, which is made.

    Raises:
        ConfigError: it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    args: list[dict[str, Any]] = []
    numbers: dict[str, Any] | None = None
    recorded = call.recorded
    site = recorded.site
    if site.spec is not None:
        for place, arg in enumerate(recorded.args):
            if isinstance(arg, Tensor):
                tensors[f"arg{place}"] = host(arg)
                args.append({"tensor": f"arg{place}", "stride": list(arg.stride())})
            else:
                args.append({"value": arg})
    else:
        numbers = _attention_inputs(call, tensors)
    diff = call.diff
    fields_ = {
        "format": _FORMAT,
        "op": site.op,
        "provider": diff.provider,
        "attributes": dict(site.attributes),
        "facts": {
            "platform": result.subject.platform,
            "device": result.subject.device,
            "against": result.reference.platform,
            "against_provider": diff.reference_provider,
            "module": diff.path,
            "request": call.request,
            "step": diff.step,
            "error": str(diff.error),
        },
        "args": args,
        "kv": None if site.kv is None else asdict(site.kv),
        "numbers": numbers,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(tensors, directory / _TENSORS)
        text = json.dumps(fields_, indent=2)
        (directory / _CALL).write_text(text + "\n", encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"--save {directory}: cannot be written: {error}") from error


def load_call(directory: Path) -> SavedCall:
    """Read what ``save_call`` wrote.

    Raises:
        ConfigError: there is no such call, or of another format.
    """
    try:
        read = json.loads((directory / _CALL).read_text(encoding="utf-8"))
        tensors = torch.load(directory / _TENSORS, map_location="cpu", weights_only=True)
        if read["format"] != _FORMAT:
            raise ConfigError(
                f"--replay {directory}: format {read['format']} is not {_FORMAT}; save the call "
                "again with this version of cardan"
            )
        kv = read["kv"]
        return SavedCall(
            op=read["op"],
            provider=read["provider"],
            attributes=read["attributes"],
            facts=read["facts"],
            tensors=tensors,
            args=tuple(read["args"]),
            kv=None if kv is None else KVCacheSpec(**kv),
            numbers=read["numbers"],
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        pickle.UnpicklingError,
    ) as error:
        raise ConfigError(
            f"--replay {directory}: holds no call saved by `cardan diff --save`: {error}"
        ) from None


def op_args(call: SavedCall, device: torch.device) -> list[Any]:
    """The operation's arguments on ``device``, as strided as they were."""
    found: list[Any] = []
    for item in call.args:
        if "value" in item:
            found.append(item["value"])
            continue
        stored = call.tensors[item["tensor"]]
        # The last axis is dense whatever the others are; expanded axes are not kept.
        stride = item["stride"] if all(item["stride"]) else list(stored.stride())
        placed = torch.empty_strided(stored.shape, stride, dtype=stored.dtype, device=device)
        found.append(placed.copy_(stored))
    return found


def layer_params(call: SavedCall, device: torch.device) -> LayerParams:
    """The constants of the attention layer."""
    own: dict[str, Any] = {
        item.name: call.tensors[item.name].to(device)
        for item in fields(LayerParams)
        if item.name in call.tensors
    }
    return LayerParams(**(call.numbers or {}), **own)


def _attention_inputs(call: FaultyCall, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put the inputs of a backend's call into ``tensors``; returns the plain numbers."""
    recorded = call.recorded
    if recorded.history is not None:
        tensors["keys"], tensors["values"] = recorded.history
    numbers: dict[str, Any] = {}
    if recorded.site.op == ATTENTION:
        q, constants = recorded.args
        tensors["q"] = host(q)
        names = [item.name for item in fields(LayerParams)]
    elif recorded.site.op == ROTATE:
        q, k, v, positions, constants = recorded.args
        tensors |= {"q": host(q), "k": host(k), "v": host(v), "positions": host(positions)}
        names = [*_ROTATION, "eps"]
        numbers["kind"] = _rotating_op(constants)
    else:
        k, v = recorded.args
        tensors |= {"k": host(k), "v": host(v)}
        return numbers
    for name in names:
        value = getattr(constants, name)
        if isinstance(value, Tensor):
            tensors[name] = host(value)
        elif value is not None:
            numbers[name] = value
    return numbers


def _rotating_op(rotation: HeadRotation) -> str:
    return "rotary_embedding" if rotation.q_weight is None else "qk_norm_rope"
