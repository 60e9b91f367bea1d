"""pytest plugin of the conformance kit.

It is loaded in every pytest run where cardan is installed. Without ``--cardan-platform`` it adds
options and fixtures and does nothing else; only pytest and the standard library are imported.
"""

import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cardan.testing.conformance.child_process import Origin
from cardan.testing.conformance.options import (
    MISSING_PLATFORM,
    KitOptions,
    add_options,
    read_options,
)

if TYPE_CHECKING:
    import numpy as np

    from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
    from cardan.core.interfaces.device import Device
    from cardan.core.interfaces.platform import Platform
    from cardan.testing.conformance.subject import Subject

# Names under which this module may be registered: as an entry point, or with -p.
_NAMES = ("cardan-conformance", "cardan.testing.conformance.plugin")
_KIT = Path(__file__).parent
_MODULE = re.compile(r"test_(l\d)_\w+\.py")

_OPTIONS: pytest.StashKey[KitOptions] = pytest.StashKey()
_SUBJECT: "pytest.StashKey[Subject]" = pytest.StashKey()
_PLATFORM: "pytest.StashKey[Platform]" = pytest.StashKey()
_ORIGIN: pytest.StashKey[Origin] = pytest.StashKey()
_IS_REFUSED: pytest.StashKey[bool] = pytest.StashKey()


def pytest_plugin_registered(plugin: object, manager: pytest.PytestPluginManager) -> None:
    """An explicit ``-p`` beside the entry point loads the module once, not twice."""
    if plugin is sys.modules[__name__]:
        for name in _NAMES:
            if manager.get_name(plugin) != name and not manager.has_plugin(name):
                manager.set_blocked(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    options = read_options(config)
    if options is None:
        return
    config.stash[_OPTIONS] = options
    # Taken before the platform is imported, which may be a dirty one.
    config.stash[_ORIGIN] = Origin.here()
    from cardan.testing.conformance.session import KitSession

    config.pluginmanager.register(KitSession(config, options), "cardan-conformance-session")


class _NoTests(pytest.Module):
    """A module of the kit that is not to be run now, and is not imported."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return []


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    level = _MODULE.fullmatch(module_path.name)
    if level is None or module_path.parent != _KIT:
        return None
    options = parent.config.stash.get(_OPTIONS, None)
    if options is None:
        parent.config.stash[_IS_REFUSED] = True
    elif level[1].upper() in options.levels:
        return None
    return _NoTests.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    if config.stash.get(_IS_REFUSED, False):
        raise pytest.UsageError(MISSING_PLATFORM)


def options_of(config: pytest.Config) -> KitOptions:
    """What the run was asked for.

    Raises:
        pytest.UsageError: no platform was named.
    """
    options = config.stash.get(_OPTIONS, None)
    if options is None:
        raise pytest.UsageError(MISSING_PLATFORM)
    return options


def subject_of(config: pytest.Config) -> "Subject":
    """The platform under test as it was named; nothing of it is imported.

    Raises:
        pytest.UsageError: no platform was named, or an unknown one.
    """
    if _SUBJECT not in config.stash:
        from cardan.testing.conformance.subject import SubjectError, resolve_subject

        try:
            config.stash[_SUBJECT] = resolve_subject(options_of(config).spec)
        except SubjectError as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[_SUBJECT]


def platform_of(config: pytest.Config) -> "Platform":
    """The platform under test, loaded once; usable at collection time, opens no device.

    Raises:
        SubjectError: it cannot be loaded.
    """
    if _PLATFORM not in config.stash:
        config.stash[_PLATFORM] = subject_of(config).load()
    return config.stash[_PLATFORM]


def device_info_of(config: pytest.Config) -> "DeviceInfo":
    """The device under test, not opened; usable at collection time.

    Raises:
        SubjectError: there is none.
    """
    return subject_of(config).device_info(platform_of(config))


@pytest.fixture(scope="session")
def cardan_spec(request: pytest.FixtureRequest) -> str:
    """The platform as it was named."""
    return options_of(request.config).spec


@pytest.fixture(scope="session")
def cardan_subject(request: pytest.FixtureRequest) -> "Subject":
    """Where the platform comes from."""
    return subject_of(request.config)


@pytest.fixture(scope="session")
def cardan_origin(request: pytest.FixtureRequest) -> Origin:
    """What processes of the kit's own start from: what the run itself started from."""
    return request.config.stash[_ORIGIN]


@pytest.fixture(scope="session")
def cardan_platform(request: pytest.FixtureRequest) -> "Platform":
    """The platform under test."""
    return platform_of(request.config)


@pytest.fixture(scope="session")
def cardan_device_info(request: pytest.FixtureRequest) -> "DeviceInfo":
    """The device under test as its platform lists it."""
    return device_info_of(request.config)


@pytest.fixture(scope="session")
def cardan_capabilities(
    cardan_platform: "Platform", cardan_device_info: "DeviceInfo"
) -> "Capabilities":
    """What the platform declares of the device."""
    return cardan_platform.capabilities(cardan_device_info)


@pytest.fixture(scope="session")
def cardan_device(
    cardan_platform: "Platform", cardan_device_info: "DeviceInfo"
) -> "Iterator[Device]":
    """The device under test, opened once and closed after the last test.

    Tests that use it run after those that open a device of their own.
    """
    device = cardan_platform.open(cardan_device_info)
    yield device
    device.close()


@pytest.fixture
def cardan_own_device(
    cardan_platform: "Platform", cardan_device_info: "DeviceInfo"
) -> "Iterator[Device]":
    """The device under test, opened for one test and closed after it."""
    device = cardan_platform.open(cardan_device_info)
    yield device
    device.close()


@pytest.fixture
def cardan_rng(request: pytest.FixtureRequest) -> "np.random.Generator":
    """Random numbers of this test alone, the same for the same seed in whatever order tests run."""
    import numpy as np

    from cardan.testing.conformance.session import kit_id

    identity = zlib.crc32(kit_id(request.node.nodeid).encode())
    return np.random.default_rng([options_of(request.config).seed, identity])
