"""Choosing tokens, log-probabilities and changes of logits through ``sampling*.c``: one call each,
on float32 logits, without sorting the vocabulary.

Weights of a row are summed in float64 over groups of 64 that are summed in float32. A row's result
depends neither on the rows beside it nor on the number of threads; a row is one thread's work.
"""

import torch
from torch import Tensor

from cardan.platforms.cpu.native.library import NativeLibrary, Pointer, Size, check, library

_OUT_OF_RANGE = 2


class SamplingKernels:
    """The operations of these names by the kernels of ``native``; their definitions are the
    catalogue's."""

    def __init__(self, native: NativeLibrary) -> None:
        self._choose = native.function(
            "cardan_choose", *[Pointer] * 3, *[Size] * 3, Pointer, Size, *[Pointer] * 4, Size
        )
        self._logprobs = native.function("cardan_logprobs", *[Pointer] * 6, *[Size] * 5)
        self._penalties = native.function("cardan_penalties", *[Pointer] * 6, *[Size] * 8)
        self._mask = native.function("cardan_token_mask", *[Pointer] * 3, *[Size] * 5)

    def choose_tokens(
        self,
        logits: Tensor,
        index: Tensor | None,
        uniform: Tensor | None,
        temperature: Tensor | None,
        top_k: Tensor | None,
        shares: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logits = _rows(logits)
        rows, vocab_size = logits.shape
        num_drawn = 0 if uniform is None else len(uniform)
        if num_drawn > rows or (uniform is not None and index is None and num_drawn < rows):
            raise ValueError(f"uniform has {num_drawn} entries for {rows} rows")
        drawn = (num_drawn,)
        index = _setting("index", index, drawn, torch.int64)
        uniform = _setting("uniform", uniform, drawn, torch.float64)
        temperature = _setting("temperature", temperature, drawn, torch.float32)
        top_k = _setting("top_k", top_k, drawn, torch.int64)
        shares = _setting("shares", shares, (2, num_drawn), torch.float64)
        tokens = torch.empty(rows, dtype=torch.int64)
        failed = torch.empty(rows, dtype=torch.bool)
        status = self._choose(
            tokens.data_ptr(),
            failed.data_ptr(),
            logits.data_ptr(),
            rows,
            vocab_size,
            logits.stride(0),
            _address(index),
            num_drawn,
            _address(uniform),
            _address(temperature),
            _address(top_k),
            _address(shares),
            torch.get_num_threads(),
        )
        if status == _OUT_OF_RANGE:
            raise IndexError(f"index must lie in [0, {rows}), the rows of logits; got {index}")
        check(status)
        return tokens, failed

    def token_logprobs(
        self, logits: Tensor, token_ids: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = _rows(logits)
        rows, vocab_size = logits.shape
        if not 0 <= k <= vocab_size:
            raise ValueError(f"k must be in [0, {vocab_size}], the vocabulary; got {k}")
        token_ids = _dense("token_ids", token_ids, (rows,), torch.int64)
        top_ids = torch.empty(rows, k, dtype=torch.int64)
        top_logprobs = torch.empty(rows, k)
        logprobs = torch.empty(rows)
        ranks = torch.empty(rows, dtype=torch.int64)
        status = self._logprobs(
            top_ids.data_ptr(),
            top_logprobs.data_ptr(),
            logprobs.data_ptr(),
            ranks.data_ptr(),
            logits.data_ptr(),
            token_ids.data_ptr(),
            rows,
            vocab_size,
            logits.stride(0),
            k,
            torch.get_num_threads(),
        )
        if status == _OUT_OF_RANGE:
            raise IndexError(f"token_ids must lie in [0, {vocab_size}), the vocabulary")
        check(status)
        return top_ids, top_logprobs, logprobs, ranks

    def apply_penalties(
        self,
        logits: Tensor,
        index: Tensor | None,
        slots: Tensor,
        prompt_mask: Tensor,
        output_counts: Tensor,
        factors: Tensor,
    ) -> None:
        rows, vocab_size = logits.shape
        _check_tables(logits, prompt_mask, output_counts)
        num_edited = rows if index is None else len(index)
        index = _setting("index", index, (num_edited,), torch.int64)
        slots = _dense("slots", slots, (num_edited,), torch.int64)
        factors = _dense("factors", factors, (3, num_edited), torch.float32)
        status = self._penalties(
            logits.data_ptr(),
            _address(index),
            slots.data_ptr(),
            prompt_mask.data_ptr(),
            output_counts.data_ptr(),
            factors.data_ptr(),
            num_edited,
            vocab_size,
            logits.stride(0),
            prompt_mask.stride(0),
            output_counts.stride(0),
            rows,
            len(prompt_mask),
            torch.get_num_threads(),
        )
        if status == _OUT_OF_RANGE:
            raise IndexError(
                f"index must lie in [0, {rows}) and slots in [0, {len(prompt_mask)}), the rows of "
                "logits and tables"
            )

    def apply_token_mask(self, logits: Tensor, bits: Tensor) -> Tensor:
        logits = _rows(logits)
        rows, vocab_size = logits.shape
        bits = _dense("bits", bits, (rows, -(-vocab_size // 32)), torch.int32)
        out = torch.empty(rows, vocab_size)
        self._mask(
            out.data_ptr(),
            logits.data_ptr(),
            bits.data_ptr(),
            rows,
            vocab_size,
            logits.stride(0),
            bits.stride(0),
            torch.get_num_threads(),
        )
        return out


def _rows(logits: Tensor) -> Tensor:
    """Float32 logits [N, V] with the logits of a row one after the other."""
    if logits.dtype is not torch.float32 or logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(
            f"logits must be float32 [N, V] with V > 0, got {logits.dtype} {tuple(logits.shape)}"
        )
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _setting(
    name: str, values: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """``values`` as a kernel reads them; None stays."""
    return None if values is None else _dense(name, values, shape, dtype)


def _dense(name: str, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``values`` without gaps, in ``dtype``."""
    if values.shape != shape:
        raise ValueError(f"{name} must be {shape}, got {tuple(values.shape)}")
    if values.dtype is not dtype:
        values = values.to(dtype)
    return values if values.is_contiguous() else values.contiguous()


def _check_tables(logits: Tensor, prompt_mask: Tensor, output_counts: Tensor) -> None:
    """Logits are written, and tables too large to be copied: they must be as the kernel reads."""
    wanted = (
        ("logits", logits, torch.float32),
        ("prompt_mask", prompt_mask, torch.bool),
        ("output_counts", output_counts, torch.int32),
    )
    for name, tensor, dtype in wanted:
        is_alike = tensor.dim() == 2 and tensor.shape[1] == logits.shape[1]
        if tensor.dtype is not dtype or not is_alike or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} must be {dtype} [*, {logits.shape[1]}] with dense rows, got "
                f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if len(prompt_mask) != len(output_counts):
        raise ValueError(
            f"prompt_mask has {len(prompt_mask)} rows and output_counts {len(output_counts)}"
        )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_KERNELS = SamplingKernels(library())
apply_penalties = _KERNELS.apply_penalties
apply_token_mask = _KERNELS.apply_token_mask
choose_tokens = _KERNELS.choose_tokens
token_logprobs = _KERNELS.token_logprobs
