"""``cardan plan``: where it looks, what it prints, how it ends."""

import json
import subprocess
import sys

import pytest

from cardan.cli.main import main
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import ConfigError, PluginError
from cardan.core.interfaces.platform import Platform, Probe
from cardan.core.platform_selection import PlatformCandidate
from cardan.plan.target import choose_target

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
KINDS = {"exact", "estimate", "unknown"}


class AcmePlatform(Platform):
    """Two devices here, three known ones; broken if asked for."""

    name = "acme"
    contract = (1, 0)
    state = "present"

    def probe(self):
        return Probe(self.state, 5, "acme's driver is old", "update it")

    def devices(self):
        return (self.info("Acme One", 0), self.info("Acme One", 1))

    def known_devices(self):
        return (self.info("Acme Two"), self.info("Acme Two Plus"), self.info("Acme Three"))

    def open(self, device):
        raise AssertionError("planning opens nothing")

    def info(self, name, index=0):
        return DeviceInfo(platform="acme", index=index, name=name, arch="a1", memory_bytes=8 << 30)


class BrokenPlatform(AcmePlatform):
    state = "broken"


class SilentPlatform(BrokenPlatform):
    def devices(self):
        raise RuntimeError("no")


class AbsentPlatform(AcmePlatform):
    state = "absent"


def candidates(platform):
    return (PlatformCandidate("acme", platform),)


@pytest.fixture
def model(tmp_path):
    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        return str(tmp_path)

    return write


@pytest.fixture
def planned(capsys):
    """The exit code, and what ``--json`` says."""

    def run(*arguments):
        code = main(["plan", *arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.model
def test_the_demo_without_torch():
    program = (
        "import sys; sys.modules['torch'] = None; from cardan.cli.main import main; "
        "code = main(['plan', 'demo', '--platform', 'cpu', '--json']); "
        "assert not [m for m in ('safetensors', 'transformers') if m in sys.modules]; "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    assert fields["fits"]
    assert fields["quantization"] == "gguf"
    # 30 layers of 3 heads of 64, keys and values, in two bytes.
    assert fields["memory"]["kv_bytes_per_token"] == {"value": 23040, "kind": "exact"}
    assert fields["memory"]["weights_stored"] == {"value": 96576768, "kind": "exact"}
    assert fields["decode"] == []
    assert "torch is not installed" in fields["notes"][0]


def test_a_device_that_is_not_here(planned, model):
    code, fields = planned(model(), "--device", "h200", "--batch", "1,1000")
    assert code == 0
    assert (fields["platform"], fields["device"], fields["is_here"]) == (
        "cuda", "NVIDIA H200", False,
    )  # fmt: skip
    sizes = [value for value in fields["memory"].values() if isinstance(value, dict)]
    assert {size["kind"] for size in sizes} <= KINDS
    first, many = fields["decode"]
    assert first["seconds"]["floor"] < first["seconds"]["expectation"]
    assert first["limited_by"] == "bandwidth: weights"
    assert first["has_room"]
    assert not many["has_room"]
    assert fields["sources"]["floors"] == "data sheet of NVIDIA H200"
    assert "H200" in fields["sources"]["expectations"]
    options = [item["option"] for item in fields["alternatives"]]
    assert "--kv-cache-dtype fp8" in options
    assert options[-1] == "--tensor-parallel-size 2"
    # Triton's kernels take no blocks, so that none of these would change anything.
    assert not any("--quantization" in option for option in options)


def test_what_does_not_fit_ends_with_remedies(capsys, model):
    path = model()
    arguments = ["plan", path, "--device", "L4", "--max-model-len", "100000"]
    assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("it does not fit: "))
    assert "a context of 100000 tokens needs" in lines[at]
    assert lines[at + 1] == "what helps, the cheapest first:"
    assert lines[at + 2].startswith("  --max-model-len ")
    length = lines[at + 2].split()[1]
    assert lines[at + 3] == "  --tensor-parallel-size 2 (2 devices)"
    assert lines[-1].startswith("  a larger device, such as NVIDIA ")
    # Who follows the first one is served, and just so.
    assert main([*arguments[:-1], length]) == 0
    assert main([*arguments[:-1], str(int(length) + 16)]) == 1


def test_weights_that_do_not_fit(planned, model):
    code, fields = planned(model(num_hidden_layers=80), "--device", "L4")
    assert code == 1
    assert fields["problem"].startswith("weights of ")
    assert fields["memory"]["kv_tokens"]["value"] == 0
    assert fields["remedies"][0].startswith("--tensor-parallel-size 2")


def test_a_cache_of_a_size_that_is_too_small(planned, model):
    code, fields = planned(model(), "--device", "H200", "--kv-cache-memory-bytes", "1M")
    assert code == 1
    assert fields["remedies"][0].startswith("no --kv-cache-memory-bytes")


def test_options_change_the_plan(planned, model):
    path = model()
    _, plain = planned(path, "--device", "H200")
    _, rounded = planned(path, "--device", "H200", "--kv-cache-dtype", "fp8")
    _, spread = planned(path, "--device", "H200", "-tp", "2")
    _, eager = planned(
        path, "--device", "H200", "--enforce-eager", "--max-num-batched-tokens", "1k"
    )
    sizes = [item["memory"]["kv_bytes_per_token"]["value"] for item in (plain, rounded, spread)]
    assert sizes == [131072, 65536, 65536]
    weights = [item["memory"]["weights"]["value"] for item in (plain, spread)]
    assert weights[1] == pytest.approx(weights[0] / 2, rel=0.001)
    assert "not counted" in spread["notes"][-1]
    assert eager["memory"]["graphs"]["value"] == 0
    assert eager["memory"]["kv_tokens"]["value"] > plain["memory"]["kv_tokens"]["value"]
    _, named = planned(path, "--device", "H200", "--kv-cache-memory-bytes", "1GiB")
    assert named["memory"]["kv_tokens"]["value"] == 8192 - 16
    assert named["memory"]["max_model_len"] == 8192 - 16
    assert "limited to 8176 tokens" in named["warning"]


def test_the_cpu_says_how_its_peaks_can_be_had(capsys, model):
    path = model(num_hidden_layers=1, vocab_size=1000)
    assert main(["plan", path, "--platform", "cpu"]) == 0
    assert "--measure measures them" in capsys.readouterr().out
    assert main(["plan", path, "--platform", "cpu", "--measure"]) == 0
    assert "floors: measured: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["org/name"], 1, "cardan plan downloads nothing"),
        (["MODEL", "--device", "H100"], 1, "may be any of: NVIDIA H100 80GB HBM3, NVIDIA H100 NVL"),
        (["MODEL", "--device", "nothing"], 1, "is not known; these are: NVIDIA B200"),
        (["MODEL", "--platform", "nobody"], 1, "no platform named 'nobody'"),
        (["MODEL", "--device", "H200", "--quantization", "gguf"], 1, "keeps the blocks of a GGUF"),
        (["MODEL", "--device", "H200", "--dtype", "float64"], 1, "model.dtype float64 is not"),
        (["MODEL", "--device", "A30", "--kv-cache-dtype", "fp8"], 1, "is not available on NVIDIA"),
        (["MODEL", "--device", "H200", "-tp", "3"], 1, "does not divide num_attention_heads"),
        (["MODEL", "--device", "H200", "--max-model-len", "1M"], 1, "positions end at 131072"),
        (["MODEL", "--device", "H200", "--batch", "1,x"], 2, "'x' is not a count"),
        (["MODEL", "--device", "H200", "--batch", "0"], 2, "must be at least 1"),
        (["MODEL", "--device", "H200", "--context", "0"], 2, "must be at least 1"),
        (["MODEL", "--device", "H200", "--prompt", "0"], 2, "must be at least 1"),
        (["MODEL", "--device", "H200", "--platform", "cpu"], 1, "cpu knows no devices by name"),
        ([], 2, "which model?"),
    ],
)
def test_errors(capsys, model, arguments, code, message):
    path = model()
    assert main(["plan", *(path if item == "MODEL" else item for item in arguments)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_a_quantized_checkpoint_of_an_unknown_scheme(capsys, model):
    path = model(quantization_config={"quant_method": "awq"})
    assert main(["plan", path, "--device", "H200"]) == 1
    assert "--quantization none plans for full precision" in capsys.readouterr().err
    assert main(["plan", path, "--device", "H200", "--quantization", "none"]) == 0


def test_the_best_platform_is_planned_for():
    target = choose_target(None, None, candidates(AcmePlatform), False)
    assert [info.name for info in target.devices] == ["Acme One", "Acme One"]
    assert target.is_here
    assert target.roofline is None
    assert choose_target("acme:1", None, candidates(AcmePlatform), False).info.index == 1
    with pytest.raises(ConfigError, match="there are: 0, 1"):
        choose_target("acme:2", None, candidates(AcmePlatform), False)


def test_a_broken_platform_will_do_and_an_absent_one_names_what_it_knows():
    target = choose_target(None, None, candidates(BrokenPlatform), False)
    assert target.notes == ("platform acme is broken here: acme's driver is old (fix: update it)",)
    with pytest.raises(PluginError, match="no device is found"):
        choose_target(None, None, candidates(SilentPlatform), False)
    with pytest.raises(PluginError, match="with --device: Acme Two, Acme Two Plus, Acme Three"):
        choose_target(None, None, candidates(AbsentPlatform), False)


@pytest.mark.parametrize(
    ("name", "found"),
    [("acme two", "Acme Two"), ("Two", "Acme Two"), ("plus", "Acme Two Plus"), ("x", None)],
)
def test_known_devices_by_their_names(name, found):
    if found is None:
        with pytest.raises(ConfigError, match="is not known"):
            choose_target(None, name, candidates(AbsentPlatform), False)
        return
    target = choose_target(None, name, candidates(AbsentPlatform), False)
    assert (target.info.name, target.is_here) == (found, False)


def test_a_platform_knows_no_peaks_and_no_devices_by_default():
    platform = AcmePlatform()
    assert Platform.roofline(platform, platform.devices()[0]) is None
    assert Platform.known_devices(platform) == ()
