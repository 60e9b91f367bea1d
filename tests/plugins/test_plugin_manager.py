"""Loading hook plugins, and calling them without letting one harm the rest."""

import logging

import pytest

from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.config.plugins import PluginConfig
from cardan.core.discovery import KERNELS, PLUGINS, Discovery
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import ConfigError, PluginError
from cardan.core.interfaces.scheduling import RequestView
from cardan.core.plugin_manager import PluginManager
from cardan.core.types.outputs import EngineStats

DEVICE = DeviceInfo(platform="acme", index=0, name="Acme", arch="a1")
HEAD = "from cardan.core.interfaces.hooks import hookimpl\ncontract = (1, 0)\n"


def plugin_source(*functions: str) -> str:
    return HEAD + "".join(f"@hookimpl\n{function}\n" for function in functions)


def manager_of(site, sources, **config):
    for name, source in sources.items():
        site.install(name, {PLUGINS: {name: f"{name}_module"}}, {f"{name}_module": source})
    return PluginManager(PluginConfig(**config), Discovery())


def request(num_prompt_tokens: int = 1) -> RequestView:
    return RequestView("id", 0, 0, 0.0, num_prompt_tokens, 16)


def status_of(manager, name):
    (status,) = [status for status in manager.plugins() if status.name == name]
    return status


def test_a_plugin_contributes_vetoes_and_observes(acme):
    manager = PluginManager(PluginConfig(), Discovery())
    status = status_of(manager, "acme_watch")
    assert (status.state, status.distribution, status.version) == ("loaded", "cardan-acme", "1.2.3")
    assert status.file.endswith("watch.py")
    (constraint,) = manager.constraints(EngineConfig(model=ModelConfig(model="demo")))
    assert constraint.owner == "plugin acme_watch"
    assert manager.admit(request()) is None
    assert manager.admit(request(2000)) == "too long for the watch"
    assert manager.implements("cardan_step_completed")
    assert not manager.implements("cardan_engine_started")
    manager.notify("cardan_step_completed", stats=EngineStats())
    assert manager.metrics() == {"acme_watch": {"acme_steps": 1.0}}
    assert manager.health() == ()


def test_no_plugins_at_all():
    manager = PluginManager(PluginConfig(), Discovery([]))
    assert manager.plugins() == ()
    manager.notify("cardan_engine_started")
    assert manager.admit(request()) is None
    assert manager.ops() == manager.kernels("acme", DEVICE) == ()


def test_blocked_is_not_imported(acme, caplog):
    import sys

    manager = PluginManager(PluginConfig(blocked=("acme_watch",)), Discovery())
    assert status_of(manager, "acme_watch").state == "blocked"
    assert "cardan_acme.watch" not in sys.modules
    PluginManager(PluginConfig(blocked=("acme_wacht",)), Discovery())
    assert "did you mean acme_watch?" in caplog.text


def test_required_and_blocked_is_an_error(acme):
    with pytest.raises(ConfigError, match="both required and blocked"):
        PluginManager(PluginConfig(required=("acme_watch",), blocked=("acme_watch",)), Discovery())


def test_required_and_missing_is_an_error(acme):
    with pytest.raises(PluginError, match="did you mean acme_watch"):
        PluginManager(PluginConfig(required=("acme_watsch",)), Discovery())


def test_one_bad_plugin_does_not_stop_the_rest(acme, caplog):
    manager = manager_of(acme, {"bad": "raise ValueError('oh no')"})
    assert status_of(manager, "acme_watch").state == "loaded"
    assert status_of(manager, "bad").state == "failed"
    assert "ValueError: oh no" in status_of(manager, "bad").reason
    warnings = [record for record in caplog.records if "bad" in record.getMessage()]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            plugin_source("def cardan_enigne_started(): ..."),
            "there is no hook cardan_enigne_started, did you mean cardan_engine_started?",
        ),
        (
            plugin_source("def cardan_constrain(confg): ..."),
            "cardan_constrain has no argument confg, did you mean config?",
        ),
        (
            HEAD + "def cardan_engine_started(): ...\n",
            "cardan_engine_started is not marked with",
        ),
        (
            HEAD + "@hookimpl(wrapper=True)\ndef cardan_engine_started():\n    return (yield)\n",
            "cardan_engine_started is a wrapper",
        ),
        ("contract = (7, 0)", "needs contract 7.0, this cardan has 1.0"),
        ("", "states no contract"),
    ],
)
def test_unusable_plugins_fail_at_load(site, source, expected):
    manager = manager_of(site, {"odd": source})
    assert status_of(manager, "odd").state == "failed"
    assert expected in status_of(manager, "odd").reason
    with pytest.raises(PluginError, match="required plugin odd failed"):
        PluginManager(PluginConfig(required=("odd",)), Discovery())


def test_a_raising_observer_is_logged_once_and_the_others_go_on(site, caplog):
    manager = manager_of(
        site,
        {
            "angry": plugin_source("def cardan_engine_started():\n    raise RuntimeError('no')"),
            "calm": HEAD
            + "seen = []\n@hookimpl\ndef cardan_engine_started():\n    seen.append(1)\n",
        },
    )
    for _ in range(3):
        manager.notify("cardan_engine_started")
    import calm_module

    assert calm_module.seen == [1, 1, 1]
    records = [record for record in caplog.records if "angry" in record.getMessage()]
    assert len(records) == 1
    assert "RuntimeError: no" in records[0].getMessage()


def test_a_failing_veto_refuses(site, caplog):
    source = plugin_source("def cardan_request_admit(request):\n    raise RuntimeError('no')")
    manager = manager_of(site, {"guard": source})
    assert manager.admit(request()) == "plugin guard failed to check the request"


def test_the_first_veto_counts_in_pluggys_order(site):
    veto = "def cardan_request_admit(request):\n    return '{}'"
    sources = {
        "aa": HEAD + f"@hookimpl(trylast=True)\n{veto.format('last')}\n",
        "bb": plugin_source(veto.format("middle")),
        "cc": HEAD + f"@hookimpl(tryfirst=True)\n{veto.format('first')}\n",
    }
    assert manager_of(site, sources).admit(request()) == "first"
    assert PluginManager(PluginConfig(blocked=("cc",)), Discovery()).admit(request()) == "middle"


def test_contributions_are_checked(site, caplog):
    sources = {"wrong": plugin_source("def cardan_kernels():\n    return ['not a provider']")}
    manager = manager_of(site, sources)
    assert manager.kernels("acme", DEVICE) == ()
    assert "expected Provider objects" in caplog.text
    strict = PluginManager(PluginConfig(required=("wrong",)), Discovery())
    with pytest.raises(PluginError, match="required plugin wrong failed in cardan_kernels"):
        strict.kernels("acme", DEVICE)


def test_wrong_constraints_are_named(site, caplog):
    sources = {"wrong": plugin_source("def cardan_constrain():\n    return ['block_size']")}
    manager = manager_of(site, sources)
    assert manager.constraints(EngineConfig(model=ModelConfig(model="demo"))) == ()
    assert "plugin wrong gave 'block_size' among its constraints" in caplog.text


def test_metrics_that_are_no_numbers(site, caplog):
    sources = {
        "words": plugin_source("def cardan_metrics():\n    return {'x': 'many'}"),
        "sick": plugin_source("def cardan_health():\n    return 'fever'"),
    }
    manager = manager_of(site, sources)
    assert manager.metrics() == {}
    assert manager.metrics() == {}
    assert caplog.text.count("plugin words failed") == 1
    assert manager.health() == ("plugin sick: fever",)


@pytest.mark.parametrize(
    ("gauges", "expected"),
    [
        ("{'a-b': 1}", "the gauge name 'a-b' must have"),
        ("{3: 1}", "the gauge name 3 must have"),
        ("{'9a': 1}", "no digit first"),
        ("{f'g{i}': i for i in range(257)}", "257 gauges, at most 256"),
    ],
)
def test_gauges_that_cannot_be_shown(site, caplog, gauges, expected):
    sources = {"odd": plugin_source(f"def cardan_metrics():\n    return {gauges}")}
    assert manager_of(site, sources).metrics() == {}
    assert expected in caplog.text


PACK = """
from cardan.core.interfaces.kernels import Provider
def fast(device):
    return [Provider(op="rms_norm", name=f"fast.{device.arch}", load="fast_kernels:norm")]
def wrong(device):
    return [1]
"""


def test_kernels_of_a_third_party_for_a_platform(site, caplog):
    entries = {"acme.fast": "fast_kernels:fast", "other.fast": "no_such_module:fast"}
    site.install("fast", {KERNELS: entries}, {"fast_kernels": PACK})
    manager = PluginManager(PluginConfig(), Discovery())
    assert manager.kernel_packs("acme") == ("acme.fast",)
    assert [item.name for item in manager.kernels("acme", DEVICE)] == ["fast.a1"]
    assert not caplog.text
    blocked = PluginManager(PluginConfig(blocked=("acme.fast",)), Discovery())
    assert blocked.kernels("acme", DEVICE) == ()
    assert manager.kernels("other", DEVICE) == manager.kernels("other", DEVICE) == ()
    assert caplog.text.count("kernels other.fast are not used: cannot load other.fast") == 1


def test_kernels_that_are_none(site, caplog):
    site.install("fast", {KERNELS: {"acme.wrong": "fast_kernels:wrong"}}, {"fast_kernels": PACK})
    assert PluginManager(PluginConfig(), Discovery()).kernels("acme", DEVICE) == ()
    assert "kernels acme.wrong are not used: TypeError: expected Provider objects" in caplog.text
    strict = PluginManager(PluginConfig(required=("acme.wrong",)), Discovery())
    with pytest.raises(PluginError, match=r"required kernels acme\.wrong failed"):
        strict.kernels("acme", DEVICE)


def test_options_are_checked(acme):
    manager = PluginManager(PluginConfig(), Discovery())
    assert manager.cli_options() == {"acme.color": "colour of the watch"}
    manager.check_options({"acme.color": "red"})
    with pytest.raises(ConfigError, match=r"did you mean acme\.color"):
        manager.check_options({"acme.colour": "red"})


def test_a_plugin_class_that_cannot_be_made(site):
    source = HEAD + "class Plugin:\n    contract = (1, 0)\n    def __init__(self):\n        1 / 0\n"
    site.install("boom", {PLUGINS: {"boom": "boom_module:Plugin"}}, {"boom_module": source})
    manager = PluginManager(PluginConfig(), Discovery())
    assert "ZeroDivisionError" in status_of(manager, "boom").reason


def test_ambiguous_names_are_one_failure(acme):
    acme.install("rival", {PLUGINS: {"acme_watch": "rival:Watch"}})
    manager = PluginManager(PluginConfig(), Discovery())
    assert status_of(manager, "acme_watch").state == "failed"
    assert "uninstall all but one" in status_of(manager, "acme_watch").reason


@pytest.fixture(autouse=True)
def _log_level(caplog):
    caplog.set_level(logging.WARNING, logger="cardan")
