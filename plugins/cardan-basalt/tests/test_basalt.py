"""The torch device by itself, and whole answers through it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cardan_basalt.platform import BasaltPlatform
from cardan_basalt.torch_backend import CHIP, BasaltTensor, register
from torch import Tensor

from cardan.core.types.sampling_params import SamplingParams
from cardan.llm import LLM
from cardan.testing.tiny_models import make_tiny_model, prompt_ids


@pytest.fixture(params=[False, True], ids=["normal", "inference"])
def _either_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    register()
    with torch.inference_mode(request.param):
        yield


either_mode = pytest.mark.usefixtures("_either_mode")


def made(*shape: int) -> tuple[Tensor, Tensor]:
    """The same numbers on the host and on the chip."""
    host = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return host, host.to("basalt:0")


@either_mode
def test_tensors_come_and_go() -> None:
    host, chip = made(3, 4)
    assert isinstance(chip, BasaltTensor)
    assert chip.device == torch.device("basalt", 0)
    for back in (chip.cpu(), chip.to("cpu"), chip.to(host), torch.empty(3, 4).copy_(chip)):
        assert type(back) is Tensor
        assert back.equal(host)
    assert chip.tolist() == host.tolist()
    assert chip.sum().item() == 66.0
    assert chip.to(torch.bfloat16).device.type == "basalt"


@either_mode
@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.arange(2, 9, 3, device=device),
        lambda device: torch.tensor([[1.5, 2.0]], device=device),
        lambda device: torch.full((2, 3), 7, device=device),
        lambda device: torch.ones(2, device=device).new_zeros(5),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.zeros(0, 4, dtype=torch.uint8, device=device),
    ],
)
def test_makers(make: Callable[[str], Tensor]) -> None:
    chip, host = make("basalt:0"), make("cpu")
    assert chip.device.type == "basalt"
    assert (chip.shape, chip.dtype, chip.stride()) == (host.shape, host.dtype, host.stride())
    assert chip.cpu().equal(host)


@either_mode
def test_views_share_memory() -> None:
    host, chip = made(3, 4)
    for tensor in (host, chip):
        tensor[1].zero_()
        tensor.t()[2:, 0] += 5
        tensor.view(-1).index_copy_(0, torch.tensor([1], device=tensor.device), tensor[2, :1] * 2)
    assert chip.cpu().equal(host)
    assert chip.add_(1) is chip
    assert torch.add(chip, chip, out=chip) is chip


@either_mode
def test_the_host_is_kept_apart() -> None:
    host, chip = made(3, 4)
    with pytest.raises(RuntimeError, match="tensors must be on one device, not basalt and cpu"):
        chip + host
    assert (chip + torch.tensor(1.0)).device.type == "basalt"


@either_mode
def test_memory_is_counted_once() -> None:
    before = CHIP.memory_allocated()
    chip = torch.zeros(256, device="basalt:0")
    parts = [chip[:10], chip.view(16, 16)]
    assert CHIP.memory_allocated() - before == 1024
    del chip, parts
    assert CHIP.memory_allocated() == before


def test_a_process_has_room_for_one_such_device() -> None:
    code = (
        "import torch; torch.utils.rename_privateuse1_backend('granit')\n"
        "from cardan_basalt.platform import BasaltPlatform\n"
        "platform = BasaltPlatform()\n"
        "platform.open(platform.devices()[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "this process has the torch device granit" in done.stderr.splitlines()[-1]


def test_it_is_never_chosen_by_itself() -> None:
    assert BasaltPlatform().probe().score == 0


def test_answers_are_the_cpus(tmp_path: Path) -> None:
    # Windows, and a soft cap, which sends it to the reference.
    make_tiny_model("gemma2", tmp_path)
    prompts = [prompt_ids(length, seed=length) for length in (3, 21)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22}
    answers = []
    for platform in ("cpu", "basalt"):
        with LLM(str(tmp_path), platform=platform, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
