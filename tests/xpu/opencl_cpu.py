"""Runs SPIR-V of Intel's Triton on Intel's OpenCL device for CPUs, on torch's own tensors."""

import ctypes

import numpy as np
import pyopencl as cl
import torch

_LANES = 32
_SCALARS = {
    "i1": np.int8,
    "i32": np.int32,
    "i64": np.int64,
    "fp32": np.float32,
    "fp64": np.float64,
}
# SPIR-V's instructions, and what of it the device refuses: attributes of kernels that say how
# fast they could be (KernelAttributesINTEL, with its execution mode, and the like).
_EXTENSION, _MODE, _CAPABILITY = 10, 16, 17
_HEADER_WORDS = 5
_REFUSED_CAPABILITIES = {5892, 6400, 6171}
_REFUSED_MODES = {5893, 6416}


class CpuDevice:
    """The device; launches end before they return."""

    def __init__(self):
        (device,) = cl.get_platforms()[0].get_devices()
        system = cl.device_svm_capabilities.FINE_GRAIN_SYSTEM
        assert device.svm_capabilities & system, "the device does not share the host's memory"
        self.name = device.name
        self._context = cl.Context([device])
        self._queue = cl.CommandQueue(self._context)
        self._built = {}

    def launch(self, compiled, grid, values):
        kernel = self._kernel(compiled)
        arguments = []
        for name, kind in compiled.src.signature.items():
            if kind != "constexpr":
                arguments.append(_argument(kind, values[name]))
        if compiled.metadata.shared:
            arguments.append(cl.LocalMemory(compiled.metadata.shared))
        arguments += [None] * (kernel.num_args - len(arguments))
        kernel.set_args(*arguments)
        lanes = compiled.metadata.num_warps * _LANES
        grid = (*grid, 1, 1)[:3]
        size = (grid[0] * lanes, *grid[1:])
        cl.enqueue_nd_range_kernel(self._queue, kernel, size, (lanes, 1, 1))
        self._queue.finish()

    def _kernel(self, compiled):
        if compiled.hash not in self._built:
            program = cl.Program(self._context, _accepted(compiled.asm["spv"]))
            program.build()
            self._built[compiled.hash] = cl.Kernel(program, compiled.metadata.name)
        return self._built[compiled.hash]


def _argument(kind, value):
    if isinstance(value, torch.Tensor):
        size = max(1, value.untyped_storage().nbytes())
        bytes_of = (ctypes.c_uint8 * size).from_address(value.data_ptr())
        return cl.SVM(np.ctypeslib.as_array(bytes_of))
    return _SCALARS[kind](value)


def _accepted(binary):
    """SPIR-V without what the device refuses and no result depends on."""
    words = np.frombuffer(binary, np.uint32)
    kept = [words[:_HEADER_WORDS]]
    at = _HEADER_WORDS
    while at < len(words):
        code, length = int(words[at]) & 0xFFFF, int(words[at]) >> 16
        instruction = words[at : at + length]
        at += length
        if code == _CAPABILITY and int(instruction[1]) in _REFUSED_CAPABILITIES:
            continue
        if code == _MODE and int(instruction[2]) in _REFUSED_MODES:
            continue
        if code == _EXTENSION and b"kernel_attributes" in instruction[1:].tobytes():
            continue
        kept.append(instruction)
    return np.concatenate(kept).tobytes()
