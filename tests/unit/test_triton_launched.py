"""The short way to launch a kernel: it must tell apart whatever Triton tells apart."""

import itertools
import os
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")

with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "0"}):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import jit
    from triton.tools.tensor_descriptor import TensorDescriptor

    from cardan.platforms.shared.triton import launched as subject


def sample(x, size, fixed, scale, flag, WIDTH: "triton.language.constexpr" = 4):
    """Only its parameters matter here."""


KERNEL = jit.JITFunction(sample, do_not_specialize=["fixed"])
BASE = torch.zeros(64, dtype=torch.int32)
SIZES = (0, 1, 2, 16, 17, 1 << 31, (1 << 31) - 1, -(1 << 31), -(1 << 31) - 1, -16)
SIZES = (*SIZES, 1 << 63, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, True, False, 1.0, None)
TENSORS = (
    BASE,
    BASE[16:],
    BASE[1:],
    BASE.view(torch.float32),
    BASE.view(torch.float16)[8:],
    TensorDescriptor.from_tensor(torch.zeros(32, 32), [16, 16]),
    TensorDescriptor.from_tensor(torch.zeros(32, 32), [16, 32]),
    TensorDescriptor.from_tensor(torch.zeros(32, 64, dtype=torch.float16), [16, 16]),
    None,
)


class Compiled:
    """A compiled kernel that notes what it is launched with."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, stream: self.launches.append((grid, args, stream))


class Driver:
    """Names a target; its device and stream are numbers."""

    def __init__(self, backend="cuda"):
        self._backend = backend
        self.device = 0

    def get_current_target(self):
        return GPUTarget(self._backend, 90, 32)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 70 + device


@pytest.fixture
def compilations(monkeypatch):
    """Launches that went through Triton, each of which compiled a kernel."""
    made = []

    def run(self, *args, grid, warmup, **named):
        made.append(Compiled())
        return made[-1]

    monkeypatch.setattr(jit.JITFunction, "run", run)
    return made


def on(monkeypatch, driver):
    monkeypatch.setattr(type(subject.driver), "active", driver)
    return subject.Launched(KERNEL)


def test_arguments_with_equal_traits_are_specialized_alike():
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = jit.create_function_from_signature(KERNEL.signature, KERNEL.params, backend)
    special = [not param.do_not_specialize for param in KERNEL.params]
    seen = {}
    for tensor, size, fixed in itertools.product(TENSORS, SIZES, SIZES):
        args = (tensor, size, fixed, 0.5, True)
        key = tuple(subject.traits(args, special))
        _, specialization, _ = binder(*args)
        assert seen.setdefault(key, specialization) == specialization, args
    # And they are not told apart without need: a number that is not specialized on has three
    # widths. Flags are told apart, as they may be constants.
    assert len({key[2] for key in seen}) == 3 + len((True, False, 1.0, None))


def test_the_second_launch_goes_to_the_compiled_kernel(monkeypatch, compilations):
    kernel = on(monkeypatch, Driver())
    for size in (32, 48, 48):
        kernel[(3, 2)](BASE, size, 7, 0.5, True, WIDTH=8)
    (compiled,) = compilations
    assert compiled.launches == [((3, 2, 1, 1), (BASE, 48, 7, 0.5, True, 8), 70)] * 2
    kernel[(1,)](BASE, 17, 7, 0.5, True, WIDTH=8)
    kernel[(1,)](BASE, 48, 7, 0.5, True, WIDTH=8, num_warps=2)
    kernel[(1,)](BASE, 48, 7, 0.5, True)
    kernel[(1,)](BASE[1:], 48, 7, 0.5, True)
    assert len(compilations) == 5
    kernel[(1,)](BASE, 64, 7, 0.25, True)
    assert compilations[3].launches == [((1, 1, 1), (BASE, 64, 7, 0.25, True, 4), 70)]


def test_each_device_has_its_own_kernels(monkeypatch, compilations):
    driver = Driver()
    kernel = on(monkeypatch, driver)
    for device in (0, 1, 0, 1):
        driver.device = device
        kernel[(1,)](BASE, 32, 7, 0.5, True)
    assert [compiled.launches[0][2] for compiled in compilations] == [70, 71]


def test_other_backends_are_left_to_triton(monkeypatch, compilations):
    kernel = on(monkeypatch, Driver("hip"))
    for _ in range(3):
        kernel[(1,)](BASE, 32, 7, 0.5, True)
    assert len(compilations) == 3
