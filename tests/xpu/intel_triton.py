"""Intel's Triton without one of Intel's GPUs: a target is described, and launches end after the
compilation, or are handed on.

Imported first of all, before any module of Triton or of cardan.
"""

import os
import sys
import tempfile
import types

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

_LANES = 32
# What devices say of themselves; of matrix products and block copies with ``matrix``.
_PROPERTIES = {
    "name": "test",
    "sub_group_sizes": [16, 32],
    "max_work_group_size": 1024,
    "has_fp64": True,
    "has_bfloat16_conversions": False,
}
_MATRIX = (
    "has_subgroup_matrix_multiply_accumulate",
    "has_subgroup_matrix_multiply_accumulate_tensor_float32",
    "has_subgroup_2d_block_io",
)


class StandIn:
    """Names the target, as a driver would."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_device_interface(self):
        return torch.cpu

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        return None


def set_target(matrix):
    """All that follows is compiled for a device with or without products of matrices."""
    properties = {**_PROPERTIES, **dict.fromkeys(_MATRIX, matrix)}
    driver.set_active(StandIn(GPUTarget("xpu", properties, _LANES)))


def hand_on(launched):
    """Compile kernels instead of launching them, and tell ``launched(fn, kernel, grid, values)``;
    ``values``: arguments by name. Kernels that this compiler refuses go to ``launched`` with the
    exception in the kernel's place."""
    compile_only = JITFunction.run

    def run(self, *args, grid, warmup, **named):
        values = {param.name: param.default for param in self.params if param.has_default}
        values |= dict(zip(self.arg_names, args, strict=False)) | named
        try:
            kernel = compile_only(self, *args, grid=grid, warmup=True, **named)
        except Exception as error:
            kernel = error
        launched(self, kernel, grid, values)
        return kernel

    JITFunction.run = run
    from cardan.platforms.shared.triton.launched import Launched

    Launched.__getitem__ = lambda self, grid: self.jit[grid]


def _without_sycl():
    """The compiler asks SYCL for nothing but an architecture's name; no headers of it are here."""
    compiler = backends["intel"].compiler
    compiler.__init__.__globals__["compile_module_from_src"] = lambda src, name: (
        types.SimpleNamespace(parse_device_arch=lambda arch: None)
    )


def _with_descriptors():
    """Triton has them from 3.4 on. Kernels that take them are for devices that copy tiles."""
    name = "triton.tools.tensor_descriptor"
    try:
        __import__(name)
    except ImportError:
        module = types.ModuleType(name)
        module.TensorDescriptor = type("TensorDescriptor", (), {})
        sys.modules[name] = module


assert triton.__version__.startswith("3.3"), triton.__version__
_without_sycl()
_with_descriptors()
