"""Triton's kernels on the host: they are imported so that its interpreter runs them."""

import os
from contextlib import contextmanager
from importlib import import_module
from unittest import mock

import numpy as np
import pytest


def interpreted(module):
    """A module of ``cardan.platforms.shared.triton`` whose kernels the interpreter runs; skips the
    test where Triton is not installed. Triton itself, too, is imported for its interpreter, and
    stays so in this process."""
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        pytest.importorskip("triton")
        _repair_products()
        _repair_float8()
        return import_module(f"cardan.platforms.shared.triton.{module}")


@contextmanager
def interpreting():
    """Kernels run inside. NumPy, which computes them, warns of infinities that they count on."""
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), np.errstate(all="ignore"):
        yield


def _repair_products():
    """The interpreter keeps bfloat16 as the bits of integers, and ``tl.dot`` multiplies these."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create = InterpreterBuilder.create_dot
    if getattr(create, "is_repaired", False):
        return

    def widened(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return create(self, widened(a), widened(b), *rest)

    create_dot.is_repaired = True
    InterpreterBuilder.create_dot = create_dot


def _repair_float8():
    """The interpreter's float8 knows no NaN, and cuts its smallest numbers off instead of rounding
    them. Here torch converts, by way of float32, as GPUs do."""
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    convert = InterpreterBuilder.create_fp_to_fp
    if getattr(convert, "is_repaired", False):
        return

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float8e4nv:
            bits = torch.from_numpy(src.data.copy()).view(torch.float8_e4m3fn)
            wide = TensorHandle(bits.to(torch.float32).numpy(), tl.float32)
            return wide if target == tl.float32 else self.create_fp_trunc(wide, dst_type)
        if target == tl.float8e4nv and source == tl.float32:
            short = torch.from_numpy(src.data.copy()).to(torch.float8_e4m3fn)
            return TensorHandle(short.view(torch.uint8).numpy(), target)
        return convert(self, src, dst_type, rounding_mode)

    create_fp_to_fp.is_repaired = True
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
