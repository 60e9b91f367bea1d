"""Plugins that were written against a former contract."""

import pytest

from cardan.core.contract_adapters.adapters import ADAPTERS, END_OF_0_1, adapt
from cardan.core.discovery import PLATFORMS, POLICIES, Discovery
from cardan.core.interfaces.platform import Platform
from cardan.core.interfaces.version import (
    ADAPTED_CONTRACTS,
    CONTRACT_VERSION,
    contract_name,
    contract_refusal,
)
from cardan.core.platform_selection import installed_platforms, select_platform
from cardan.testing.tiny_models import make_tiny_model

# A platform as they were under contract 0.1: executor() took a device and a configuration.
OLDCHIP = """
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.platform import Platform, Probe

class Oldchip(Platform):
    "The chip of old."
    name = "oldchip"
    contract = (0, 1)

    def probe(self):
        return Probe.present(1)

    def devices(self):
        return [DeviceInfo(platform="oldchip", index=0, name="Oldchip", arch="o1")]

    def open(self, device):
        raise NotImplementedError

    def executor(self, the_device, settings):
        return ("made", the_device, settings)
"""


@pytest.fixture
def oldchip(site):
    site.install(
        "cardan-oldchip", {PLATFORMS: {"oldchip": "oldchip:Oldchip"}}, {"oldchip": OLDCHIP}
    )
    return site


def test_a_platform_of_contract_0_1_serves_with_a_warning(oldchip, caplog):
    discovery = Discovery()
    for _ in range(2):
        platform = select_platform("oldchip", installed_platforms(discovery)).platform
    assert platform.executor("device", "config", parts="parts") == ("made", "device", "config")
    assert platform.executor("device", "config", "parts") == ("made", "device", "config")
    assert type(platform).__name__ == "Oldchip"
    assert type(platform).__module__ == "oldchip"
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "oldchip of cardan-oldchip 1.0 (cardan.platforms: oldchip:Oldchip) is deprecated: it was "
        "written for contract 0.1; executor() takes 'parts' since contract 1.0 and is called "
        "without it (its executor cannot build on the engine's own parts); add the argument "
        "before contract 1.2, which drops this help; set contract = (1, 0) once it keeps contract "
        "1.0: contract 1.2 refuses 0.1"
    )


# One whose executor runs a model, over the fake device.
OLDFAKE = """
from cardan.testing.fake.executor import FakeExecutor
from cardan.testing.fake.platform import FakePlatform
from cardan.testing.fake.settings import FakeSettings

class Oldfake(FakePlatform):
    name = "oldfake"
    contract = (0, 1)

    def __init__(self):
        self.settings = FakeSettings.parse("tier=executor")
        super().__init__(self.settings)

    def executor(self, device, config):
        return FakeExecutor(device, self.settings, config)
"""


def test_its_executor_answers_through_the_engine(site, tmp_path, caplog):
    from cardan import LLM, SamplingParams

    site.install(
        "cardan-oldfake", {PLATFORMS: {"oldfake": "oldfake:Oldfake"}}, {"oldfake": OLDFAKE}
    )
    make_tiny_model("llama", tmp_path / "model")
    with LLM(str(tmp_path / "model"), platform="oldfake", kv_cache_memory_bytes=1 << 22) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        [answer] = llm.generate([{"prompt_token_ids": [3, 5, 7]}], params)
    assert len(answer.outputs[0].token_ids) == 4
    assert caplog.text.count("oldfake of cardan-oldfake 1.0") == 1


def test_a_plugin_that_needs_no_change_is_told_the_rest(site, caplog):
    source = "class Fair:\n    contract = (0, 1)\n"
    site.install("fair", {POLICIES: {"fair": "fair_policy:Fair"}}, {"fair_policy": source})
    loaded = Discovery().load(POLICIES, "fair")
    assert loaded.__mro__[1] is object
    assert "set contract = (1, 0)" in caplog.text
    assert "executor" not in caplog.text


class Modern(Platform):
    name = "modern"
    contract = (0, 1)

    def executor(self, device, config, parts):
        return parts


class Open(Modern):
    def executor(self, *args, **kwargs):
        return args, kwargs


class Plain(Platform):
    executor = Platform.executor


@pytest.mark.parametrize("loaded", [Modern, Open, Plain, "no class", int])
def test_what_is_fit_stays_as_it_is(loaded):
    assert adapt(loaded, (0, 1)).loaded is loaded


def test_present_contracts_are_told_nothing():
    assert adapt(Modern, CONTRACT_VERSION).notices == ()


def test_every_adapter_has_an_end_ahead():
    # The change that raises the version to an adapter's end removes the adapter.
    assert all(item.since <= CONTRACT_VERSION < item.removed_in for item in ADAPTERS)
    assert all(hasattr(item.interface, item.member) for item in ADAPTERS)
    assert not ADAPTED_CONTRACTS or CONTRACT_VERSION < END_OF_0_1


@pytest.mark.parametrize(
    ("contract", "expected"),
    [
        (CONTRACT_VERSION, None),
        ((0, 1), None),
        ((0, 2), "written for contract 0.2, this cardan has 1.0-rc (and adapts: 0.1)"),
        ((1, 1), "needs contract 1.1, this cardan has 1.0-rc; upgrade cardan"),
        ((2, 0), "needs contract 2.0, this cardan has 1.0-rc; upgrade cardan"),
        ([1, 0], "must be a pair of integers"),
        (("1", "0"), "must be a pair of integers"),
        ((1, 0, 0), "must be a pair of integers"),
    ],
)
def test_which_contracts_are_served(contract, expected):
    refusal = contract_refusal(contract)
    assert refusal is None if expected is None else expected in refusal


def test_the_candidate_says_so():
    assert contract_name() == "1.0-rc"
