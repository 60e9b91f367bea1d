"""Platforms of an installed distribution: selection, ``cardan platforms``, ``cardan doctor``."""

import json
import sys

import pytest

from cardan.cli.main import main
from cardan.core.discovery import PLATFORMS, Discovery
from cardan.core.interfaces.errors import PluginError
from cardan.core.platform_selection import installed_platforms, probe_platforms, select_platform


def test_named_selection_imports_only_that_one(acme):
    selection = select_platform("acme:1", installed_platforms(Discovery()))
    assert selection.platform.name == "acme"
    assert [device.index for device in selection.devices] == [1]
    assert "cardan_acme.broken" not in sys.modules
    assert "torch" not in {name for name in sys.modules if name.startswith("cardan_acme")}


def test_a_broken_import_stops_selection(acme):
    with pytest.raises(PluginError) as caught:
        select_platform(None, installed_platforms(Discovery()))
    message = str(caught.value)
    assert "platform acme_broken is broken" in message
    assert "librocket.so.7" in message
    assert "--platform acme" in message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("Thing = 3", "states no contract"),
        ("class Thing:\n    contract = (1, 0)", "is not a subclass"),
        ("class Thing(Platform):\n    contract = (1, 0)\n    name = 'x'", "is named 'x'"),
        (
            "class Thing(Platform):\n    contract = (1, 0)\n    name = 'odd'",
            "does not implement devices, open, probe",
        ),
    ],
)
def test_unusable_classes(site, body, expected):
    source = f"from cardan.core.interfaces.platform import Platform\n{body}\n"
    site.install("odd", {PLATFORMS: {"odd": "odd_platform:Thing"}}, {"odd_platform": source})
    found = [item for item in installed_platforms(Discovery()) if item.name == "odd"]
    (report,) = probe_platforms(found)
    assert report.probe.state == "broken"
    assert expected in report.probe.reason


def test_platforms_command(acme, capsys):
    assert main(["platforms"]) == 0
    out = capsys.readouterr().out
    assert "acme present (score 90) two rockets found" in out
    assert "0: Rocket (r2)" in out
    assert "acme_broken broken" in out
    assert main(["platforms", "--json"]) == 0
    items = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert items["acme"]["distribution"] == "cardan-acme"
    assert [device["index"] for device in items["acme"]["devices"]] == [0, 1]
    assert "librocket" in items["acme_broken"]["reason"]


def test_doctor_on_a_named_platform(acme, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--platform", "acme:0"]) == 0
    out = capsys.readouterr().out
    for text in (
        "chosen: acme: named by the user",
        "Device 0 of acme: Rocket",
        "6.0 GiB free of 8.0 GiB (estimated)",
        "the platform runs whole steps itself",
        "acme.rocket  no: k_head_dim 128 exceeds 64",
        "bfloat16, float32",
        "acme_watch loaded",
        "contract",
    ):
        assert text in out


def test_doctor_as_json(acme, capsys):
    assert main(["doctor", "--json", "--platform", "acme", "--no-plugin", "acme_watch"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] is True
    assert found["platform"] == "acme"
    assert len(found["devices"]) == 2
    assert found["devices"][0]["attention"][0]["accepted"] is False
    assert {item["name"]: item["state"] for item in found["plugins"]}["acme_watch"] == "blocked"
    assert found["versions"]["python"]


def test_doctor_when_something_is_broken(acme, capsys):
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] is False
    assert found["platform"] is None
    assert "librocket" in found["error"]
    assert {item["name"] for item in found["platforms"]} >= {"acme", "acme_broken"}


def test_doctor_reports_what_a_platform_fails_at(acme, capsys, monkeypatch):
    from cardan_acme.platform import AcmePlatform

    def fail(self, device):
        raise RuntimeError("ask me later")

    monkeypatch.setattr(AcmePlatform, "capabilities", fail)
    assert main(["doctor", "--json", "--platform", "acme:0"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert "capabilities(): RuntimeError: ask me later" in device["problems"]


def test_a_device_that_does_not_open_is_not_usable(acme, capsys, monkeypatch):
    from cardan_acme.platform import AcmePlatform

    def fail(self, device):
        raise OSError("no fuel")

    monkeypatch.setattr(AcmePlatform, "open", fail)
    assert main(["doctor", "--platform", "acme:0"]) == 1
    assert "cannot open device 0 (Rocket): OSError: no fuel" in capsys.readouterr().out


def test_the_kernel_table_comes_from_an_opened_device(acme, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    from cardan_acme.device import AcmeDevice

    monkeypatch.setattr(AcmeDevice, "torch_device", torch.device("cpu"))
    assert main(["doctor", "--json", "--platform", "acme:0"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    kernels = {row["op"]: row for row in device["kernels"]}
    assert kernels["rms_norm"]["provider"] == "reference"
    assert device["problems"] == []
