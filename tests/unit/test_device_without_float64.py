"""A device that has no float64 samples without a tensor of that dtype."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cardan import LLM, SamplingParams
from cardan.core.interfaces.kernels import Provider
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.self_check import LoadedKernel, self_check
from cardan.platforms.cpu.platform import CpuPlatform
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

# Arrays of the host become tensors of another dtype by these, before they are copied to a device.
ON_THE_HOST = (torch.ops.aten.lift_fresh.default, torch.ops.aten.to.dtype)


class NoFloat64(TorchDispatchMode):
    """Fails where an operation takes or makes float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in ON_THE_HOST:
            return result
        for value in (*args, result):
            wide = isinstance(value, torch.Tensor) and value.dtype == torch.float64
            assert not wide, f"{func} saw float64"
        return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_tiny_model("llama", path)
    return str(path)


def answers(folder):
    params = SamplingParams(
        temperature=1.0, top_p=0.9, min_p=0.01, seed=7, max_tokens=8, logprobs=2
    )
    prompts = [{"prompt_token_ids": prompt_ids(length, length)} for length in (3, 9)]
    settings = {"platform": "cpu", "dtype": "float32", "num_threads": 1, "num_blocks": 24}
    with LLM(folder, kernels=("-choose_tokens",), **settings) as llm:
        executor = llm._client._loop._engine._executor
        sample = executor._runner.sample

        def watched(*args):
            with NoFloat64():
                return sample(*args)

        if not executor._parts.device.capabilities.float64:
            executor._runner.sample = watched
        found = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in found]


def test_it_samples_as_others_do(folder, monkeypatch):
    truth = answers(folder)
    own = CpuPlatform.capabilities
    monkeypatch.setattr(
        CpuPlatform, "capabilities", lambda self, device: replace(own(self, device), float64=False)
    )
    assert answers(folder) == truth


OPS = {op.name: op for op in CATALOGUE}


@pytest.mark.parametrize("op", CATALOGUE, ids=lambda op: op.name)
def test_kernels_are_checked_without_it(op):
    """Of operations that are one kernel, by their definition under watch."""
    if op.parts:
        pytest.skip("composite; its parts are here")
    calls = []

    def kernel(*args):
        with NoFloat64():
            calls.append(op.body(*args))
        return calls[-1]

    provider = Provider(op=op.name, name="test.watched", load="x:y")
    dtype = "bfloat16" if "bfloat16" in op.tolerances else "float32"
    found = self_check(
        op, provider, LoadedKernel(kernel), dtype, OPS, torch.device("cpu"), (), float64=False
    )
    assert found.ok, found.text
    assert calls


@pytest.mark.parametrize("in_features", [1000, 1024, 5000])
def test_products_of_8_bits_are_exact_without_it(in_features):
    """Numbers of one sign, whose sums leave what float32 holds exactly."""
    generator = torch.Generator().manual_seed(in_features)
    x = torch.randint(100, 128, (3, in_features), generator=generator).float()
    x[:, 0] = 127.0
    weight = torch.randint(100, 128, (5, in_features), generator=generator).to(torch.int8)
    with NoFloat64():
        found = OPS["int8_linear"].body(x, weight, torch.ones(5), None)
    want = x.double() @ weight.double().T
    assert torch.equal(found, want.float())
