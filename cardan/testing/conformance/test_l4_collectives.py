"""L4: the platform's collectives, between processes that each open a device."""

from collections.abc import Callable

import pytest

from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.platform import Platform
from cardan.testing.conformance.child_process import Origin
from cardan.testing.conformance.plugin import device_info_of, options_of, platform_of
from cardan.testing.conformance.rank_group import RankGroup, case_names, run_ranks
from cardan.testing.conformance.results import not_supported
from cardan.testing.conformance.subject import Subject

LEVEL = "L4"

_SIZES = (2, 4)


@pytest.fixture(scope="module")
def group_of(
    request: pytest.FixtureRequest,
    cardan_subject: Subject,
    cardan_platform: Platform,
    cardan_origin: Origin,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], RankGroup]:
    """A group of a size, which has run all cases; made once for each size."""
    made: dict[int, RankGroup] = {}

    def group(size: int) -> RankGroup:
        if size not in made:
            devices = _devices(cardan_subject, cardan_platform, size)
            extra = cardan_platform.child_env("worker", devices)
            made[size] = run_ranks(
                cardan_subject,
                [info.index for info in devices],
                _cases(request.config),
                options_of(request.config).seed,
                tmp_path_factory.mktemp(f"ranks{size}"),
                cardan_origin.with_environment(extra),
            )
        return made[size]

    return group


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("case", _cases(metafunc.config))
    metafunc.parametrize("size", _SIZES)


def test_collective(group_of: Callable[[int], RankGroup], size: int, case: str) -> None:
    """A collective between processes is right, in time, and equal on every rank."""
    group = group_of(size)
    group.require_joined()
    results = group.results(case)
    for rank, result in enumerate(results):
        if result["outcome"] == "failed":
            pytest.fail(f"rank {rank} of {size}: {result['reason']}")
    for result in results:
        if result["outcome"] == "not supported":
            not_supported(result["reason"])
    bits = {result["bits"] for result in results}
    assert len(bits) == 1, f"{size} ranks have {len(bits)} different results, bit by bit"


def _cases(config: pytest.Config) -> list[str]:
    info = device_info_of(config)
    return case_names(platform_of(config).capabilities(info).dtypes)


def _devices(subject: Subject, platform: Platform, size: int) -> list[DeviceInfo]:
    """One device for each rank, or where there are too few, the tested one for all."""
    devices = list(platform.devices())[:size]
    return devices if len(devices) == size else [subject.device_info(platform)] * size
