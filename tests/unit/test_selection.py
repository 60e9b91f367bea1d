"""Choosing a platform, and the runtime that opens its devices."""

import logging

import pytest

from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import ConfigError, PluginError, UnsupportedError
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.platform import Platform, Probe
from cardan.core.platform_selection import (
    PlatformCandidate,
    parse_platform_spec,
    probe_platforms,
    select_platform,
)
from cardan.core.runtime import Runtime


class StubDevice(Device):
    def __init__(self, info, log, fails=False):
        self.info = info
        self._log = log
        self._fails = fails

    @property
    def torch_device(self):
        return None

    def memory_info(self):
        return MemoryInfo(1, 1)

    def synchronize(self):
        pass

    def communicator(self, group):
        raise NotImplementedError

    def close(self):
        self._log.append((self.info.platform, self.info.index))
        if self._fails:
            raise OSError("stuck")


def make_platform(name, probe, num_devices=1, claims=(), open_error=None, closes_badly=False):
    closed = []

    class Stub(Platform):
        contract = (1, 0)

        def probe(self):
            if isinstance(probe, BaseException):
                raise probe
            return probe

        def devices(self):
            return [
                DeviceInfo(platform=name, index=index * 2, name="Stub", arch="s1")
                for index in range(num_devices)
            ]

        def open(self, device):
            if open_error is not None:
                raise open_error
            return StubDevice(device, closed, closes_badly)

    Stub.name = name
    Stub.claims = frozenset(claims)
    stub = Stub()
    stub.closed = closed
    return stub


def candidate(name, probe, **more):
    return PlatformCandidate(
        name, lambda: make_platform(name, probe, **more), f"cardan-{name}", "1"
    )


def unloadable(name, error):
    def load():
        raise error

    return PlatformCandidate(name, load, f"cardan-{name}", "1")


def test_the_best_score_wins_and_the_others_are_listed():
    selection = select_platform(
        None,
        [
            candidate("cpu", Probe.present(1)),
            candidate("fast", Probe.present(100), num_devices=2),
            candidate("slow", Probe.present(50)),
            candidate("none", Probe.absent("no device file")),
        ],
    )
    assert selection.platform.name == "fast"
    assert [device.index for device in selection.devices] == [0, 2]
    assert selection.reason == "best score (100), also present: slow (50), cpu (1)"
    assert [item.name for item in selection.report] == ["cpu", "fast", "slow", "none"]


def test_equal_scores_are_decided_by_name():
    found = [candidate("b", Probe.present(5)), candidate("a", Probe.present(5))]
    assert select_platform(None, found).platform.name == "a"


def test_the_only_one():
    selection = select_platform(None, [candidate("cpu", Probe.present(1))])
    assert selection.reason == "best score (1), the only one present"


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (candidate("fast", Probe.broken("driver too old", "upgrade it")), "driver too old; fix: "),
        (candidate("fast", RuntimeError("probe blew up")), "RuntimeError: probe blew up"),
        (candidate("fast", SystemExit(1)), "SystemExit: 1"),
        (candidate("fast", "present"), "probe() returned 'present', not a Probe"),
        (candidate("fast", Probe.present(9), num_devices=0), "devices() lists none"),
        (unloadable("fast", PluginError("cannot load fast")), "cannot load fast"),
        (unloadable("fast", OSError("libfast.so")), "upgrade or uninstall cardan-fast"),
    ],
)
def test_a_broken_accelerator_never_falls_back_by_itself(broken, expected):
    cpu = candidate("cpu", Probe.present(1))
    with pytest.raises(PluginError) as caught:
        select_platform(None, [broken, cpu])
    message = str(caught.value)
    assert "platform fast is broken: " in message
    assert expected in message
    assert "--platform cpu" in message
    assert select_platform("cpu", [broken, cpu]).platform.name == "cpu"
    with pytest.raises(PluginError, match="platform fast is broken"):
        select_platform("fast", [broken, cpu])


def test_a_named_platform_is_the_only_one_loaded():
    def load():
        raise AssertionError("must not be loaded")

    found = [PlatformCandidate("other", load), candidate("cpu", Probe.present(1))]
    selection = select_platform("cpu", found)
    assert selection.reason == "named by the user"
    assert [item.name for item in selection.report] == ["cpu"]


def test_named_devices_in_the_order_given():
    found = [candidate("fast", Probe.present(1), num_devices=3)]
    selection = select_platform("fast:4,0", found)
    assert [device.index for device in selection.devices] == [4, 0]
    with pytest.raises(ConfigError, match="asks for fast device 1, there are: 0, 2, 4"):
        select_platform("fast:0,1", found)


@pytest.mark.parametrize("spec", ["fast:", "fast:x", "fast:0,0", "fast:-1", ":0", "fast:0,", ""])
def test_malformed_specs(spec):
    with pytest.raises(ConfigError, match="is not NAME or NAME:INDEX"):
        parse_platform_spec(spec)


def test_named_and_absent():
    with pytest.raises(PluginError, match="platform fast finds no device: none plugged in"):
        select_platform("fast", [candidate("fast", Probe.absent("none plugged in"))])


def test_named_and_unknown():
    with pytest.raises(PluginError) as caught:
        select_platform("fats", [candidate("fast", Probe.present(1))])
    assert "did you mean fast?" in str(caught.value)
    assert "pip install 'cardan[fats]'" in str(caught.value)


def test_nothing_found_prints_all_probes():
    found = [candidate("one", Probe.absent("no file")), candidate("other", Probe.absent("no bus"))]
    with pytest.raises(PluginError) as caught:
        select_platform(None, found)
    lines = str(caught.value).splitlines()
    assert lines == [
        "no platform finds a device:",
        "  one    absent   no file",
        "  other  absent   no bus",
    ]


def test_nothing_installed():
    for name in (None, "cpu"):
        with pytest.raises(PluginError, match=r"pip install -e \."):
            select_platform(name, [])


def test_probes_report_their_origin():
    (item,) = probe_platforms([candidate("cpu", Probe.present(1))])
    assert (item.distribution, item.version) == ("cardan-cpu", "1")
    assert item.seconds >= 0


def test_runtime_opens_and_closes_in_reverse():
    platform = make_platform("a", Probe.present(1), num_devices=2)
    with Runtime() as runtime:
        opened = [runtime.open(platform, info) for info in platform.devices()]
        assert list(runtime.devices) == opened
        with pytest.raises(ConfigError, match="device 0 of platform a is open already"):
            runtime.open(platform, platform.devices()[0])
    assert platform.closed == [("a", 2), ("a", 0)]
    runtime.close()
    assert runtime.devices == ()
    with pytest.raises(ConfigError, match="the runtime is closed"):
        runtime.open(platform, platform.devices()[0])


def test_claims_collide_until_the_holder_is_closed():
    first = make_platform("a", Probe.present(1), claims=["slot", "other"])
    second = make_platform("b", Probe.present(1), claims=["slot"])
    third = make_platform("c", Probe.present(1))
    with Runtime() as runtime:
        device = runtime.open(first, first.devices()[0])
        runtime.open(third, third.devices()[0])
        with pytest.raises(ConfigError, match="platforms a and b both claim slot"):
            runtime.open(second, second.devices()[0])
        runtime.close_device(device)
        runtime.open(second, second.devices()[0])
        with pytest.raises(ConfigError, match="closed it already"):
            runtime.close_device(device)


def test_claims_are_the_process_s_whoever_opened():
    first = make_platform("a", Probe.present(1), num_devices=2, claims=["slot"])
    second = make_platform("b", Probe.present(1), claims=["slot"])
    with Runtime() as outer:
        one, two = (outer.open(first, info) for info in first.devices())
        with Runtime() as inner:
            with pytest.raises(ConfigError, match="platforms a and b both claim slot"):
                inner.open(second, second.devices()[0])
            again = inner.open(first, first.devices()[0])
            outer.close_device(one)
            outer.close_device(two)
            with pytest.raises(ConfigError, match="both claim slot"):
                outer.open(second, second.devices()[0])
            inner.close_device(again)
            inner.open(second, second.devices()[0])
        outer.open(first, first.devices()[0])
    with Runtime() as later:
        later.open(second, second.devices()[0])


def test_a_platform_takes_all_its_claims_or_none():
    first = make_platform("a", Probe.present(1), claims=["y"])
    second = make_platform("b", Probe.present(1), claims=["x", "y"])
    third = make_platform("c", Probe.present(1), claims=["x"])
    with Runtime() as runtime:
        runtime.open(first, first.devices()[0])
        with pytest.raises(ConfigError, match="platforms a and b both claim y"):
            runtime.open(second, second.devices()[0])
        runtime.open(third, third.devices()[0])


def test_failures_to_open_are_named_and_claim_nothing():
    info = make_platform("a", None).devices()[0]
    with Runtime() as runtime:
        bad = make_platform("a", Probe.present(1), claims=["slot"], open_error=OSError("busy"))
        with pytest.raises(PluginError, match=r"cannot open device 0 \(Stub\): OSError: busy"):
            runtime.open(bad, info)
        refusing = make_platform("a", Probe.present(1), open_error=UnsupportedError("no"))
        with pytest.raises(UnsupportedError, match=r"^no$"):
            runtime.open(refusing, info)
        other = make_platform("b", Probe.present(1), claims=["slot"])
        runtime.open(other, other.devices()[0])
        with pytest.raises(PluginError, match="says it belongs to a"):
            runtime.open(other, info)


def test_one_failing_close_does_not_keep_the_rest_open(caplog):
    bad = make_platform("a", Probe.present(1), closes_badly=True)
    good = make_platform("b", Probe.present(1))
    runtime = Runtime()
    runtime.open(good, good.devices()[0])
    runtime.open(bad, bad.devices()[0])
    with caplog.at_level(logging.WARNING, logger="cardan"):
        runtime.close()
    assert good.closed == [("b", 0)]
    assert "failed to close: OSError: stuck" in caplog.text
