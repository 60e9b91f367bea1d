"""Turns the stored bytes of a GGUF tensor into a torch tensor."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from cardan.core.interfaces.errors import WeightsError
from cardan.core.ops.reference.block_decoders import DECODERS
from cardan.core.types.ggml import BLOCK_FORMATS, GGMLType

PLAIN_DTYPES: Final[dict[GGMLType, torch.dtype]] = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
    GGMLType.F64: torch.float64,
    GGMLType.I8: torch.int8,
    GGMLType.I16: torch.int16,
    GGMLType.I32: torch.int32,
    GGMLType.I64: torch.int64,
}
# Elements decoded at a time: the float32 scratch of a chunk stays within a core's cache.
_CHUNK_ELEMENTS: Final = 1 << 16


def dequantize(
    raw: npt.NDArray[np.uint8], type_id: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Decode a tensor.

    Args:
        raw: the bytes as stored, one dimension.
        type_id: a `GGMLType`.
        shape: of the result, row major.
        dtype: of the result, a floating type. Quantised types are decoded in float32 and rounded
            once; unquantised types are converted directly.

    Returns:
        A contiguous tensor of `shape`. It shares memory with `raw` if the stored type is `dtype`
        and `raw` may be written to.

    Raises:
        WeightsError: the type is unknown or cannot be decoded, `raw` has the wrong size for
            `shape`, or `dtype` is not a floating type.
    """
    try:
        ggml_type = GGMLType(type_id)
    except ValueError:
        raise WeightsError(f"unknown GGML tensor type {type_id}") from None
    if not dtype.is_floating_point:
        raise WeightsError(f"dtype: {dtype} is not a floating type")
    block = BLOCK_FORMATS[ggml_type]
    numel = math.prod(shape)
    row = shape[-1] if shape else 1
    if row % block.elements or raw.size != numel // block.elements * block.nbytes:
        raise WeightsError(
            f"{raw.size} bytes of type {ggml_type.name} do not make a tensor of shape {shape} "
            f"({block.nbytes} bytes hold {block.elements} elements of a row)"
        )
    plain = PLAIN_DTYPES.get(ggml_type)
    if plain is not None:
        return _plain(raw, plain, shape).to(dtype)
    decode = DECODERS.get(ggml_type) or _decoder_of_gguf_package(ggml_type)
    out = torch.empty(numel, dtype=dtype)
    _decode_chunks(raw.reshape(-1, block.nbytes), block.elements, decode, out)
    return out.reshape(shape)


def _plain(raw: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if raw.size == 0:
        return torch.empty(shape, dtype=dtype)
    # torch takes writable, aligned memory only; GGUF files align every tensor.
    if not raw.flags.writeable or raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def _decode_chunks(
    blocks: npt.NDArray[np.uint8],
    elements: int,
    decode: Callable[[npt.NDArray[np.uint8], npt.NDArray[np.float32]], None],
    out: torch.Tensor,
) -> None:
    step = max(1, _CHUNK_ELEMENTS // elements)
    direct = out.numpy() if out.dtype == torch.float32 else None
    scratch = torch.empty(0 if direct is not None else min(step, len(blocks)) * elements)
    # Damaged scales may be infinite: the result says so, without a warning for every chunk.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            chunk = blocks[start : start + step]
            first, size = start * elements, len(chunk) * elements
            if direct is not None:
                decode(chunk, direct[first : first + size].reshape(-1, elements))
                continue
            decode(chunk, scratch[:size].numpy().reshape(-1, elements))
            out[first : first + size].copy_(scratch[:size])


def _decoder_of_gguf_package(
    ggml_type: GGMLType,
) -> Callable[[npt.NDArray[np.uint8], npt.NDArray[np.float32]], None]:
    """The decoder of the `gguf` package, for the types that are rare enough to leave to it."""
    try:
        quants: Any = importlib.import_module("gguf.quants")
    except ImportError as error:
        raise WeightsError(
            f"type {ggml_type.name} is decoded by the `gguf` package, which is not installed: "
            "pip install cardan[gguf]"
        ) from error
    try:
        package_type = quants.GGMLQuantizationType(ggml_type.value)
        probe = np.zeros((1, BLOCK_FORMATS[ggml_type].nbytes), np.uint8)
        quants.dequantize(probe, package_type)
    except (NotImplementedError, ValueError) as error:
        raise WeightsError(
            f"type {ggml_type.name} is decoded neither by cardan nor by the installed `gguf` "
            "package; convert the model to another type"
        ) from error

    def decode(blocks: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
        out[:] = quants.dequantize(blocks, package_type)

    return decode
