"""A server whose engine runs in another virtual environment, where alone the platform is."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest
from server_process import serving

from cardan.testing.tiny_models import make_tiny_model, make_tokenizer

REPO = Path(__file__).parents[2]

PLATFORM = """
import os
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.platform import Platform, Probe

class Away(Platform):
    name, contract = "away", {contract}

    def probe(self):
        return Probe.present(1, "in this environment alone")

    def devices(self):
        return [DeviceInfo(platform="away", index=0, name="Away", arch="a1")]

    def child_env(self, role, devices):
        return {{"AWAY_ROLE": role}}

    def open(self, device):
        from cardan.core.interfaces.torch_device import TorchDevice

        assert os.environ["AWAY_ROLE"] == "engine"
        memory = MemoryInfo(total=2**30, free=2**30, exact=False)
        return TorchDevice(device, self.capabilities(device), "cpu", lambda: memory)
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A virtual environment that sees what this one has, and a platform of its own."""
    from cardan.core.interfaces.version import CONTRACT_VERSION

    folder = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.check_output([python, "-c", ask], text=True).strip())
    ours = [sysconfig.get_paths()["purelib"], str(REPO)]
    (site / "ours.pth").write_text("\n".join(ours) + "\n")
    (site / "away_platform.py").write_text(PLATFORM.format(contract=CONTRACT_VERSION))
    info = site / "away-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: away\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cardan.platforms]\naway = away_platform:Away\n")
    return python


@pytest.mark.slow
def test_the_engine_runs_where_the_platform_is(elsewhere, tmp_path):
    model = tmp_path / "model"
    make_tiny_model("llama", model)
    make_tokenizer().save(str(model / "tokenizer.json"))
    options = ("--dtype", "float32", "--kv-cache-memory-bytes", "1MiB", "--threads", "1")
    body = {"prompt": "w5 w17", "max_tokens": 4, "min_tokens": 4, "temperature": 0}
    places = {
        str(elsewhere): ("--platform", "away", "--engine-python", str(elsewhere)),
        sys.executable: ("--platform", "cpu"),
    }
    answers = []
    for python, place in places.items():
        with serving(tmp_path / "log", *options, *place, model=model) as server:
            assert server.engine.cmdline()[0] == python
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0]["text"])
    assert answers[0] == answers[1]


def test_it_is_missing_here():
    done = subprocess.run(
        [sys.executable, "-m", "cardan", "serve", "demo", "--platform", "away", "--port", "0"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "no platform named 'away'" in done.stderr
