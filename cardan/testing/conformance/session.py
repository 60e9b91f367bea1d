"""One run of the kit: which tests run, in which order, and the report at its end."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import pytest

from cardan.testing.conformance.options import KitOptions
from cardan.testing.conformance.results import (
    ID_PROPERTY,
    LEVEL_PROPERTY,
    LEVELS,
    TITLE_PROPERTY,
    KitResult,
    KitResults,
    failure_reason,
    result_of,
)

_OPENED = "cardan_device"


def kit_id(nodeid: str) -> str:
    """A test's name in reports: its module and function, wherever the kit is installed."""
    path, _, name = nodeid.partition("::")
    return f"{PurePosixPath(path).stem}::{name}" if name else PurePosixPath(path).stem


class KitSession:
    """Plugin object of a run in which a platform was named."""

    def __init__(self, config: pytest.Config, options: KitOptions) -> None:
        self._config = config
        self._options = options
        self._results = KitResults()
        self._is_interrupted = False
        self._is_selection = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Refuse an unknown platform, and one without a device, before any module is imported."""
        from cardan.testing.conformance.plugin import device_info_of, platform_of, subject_of
        from cardan.testing.conformance.subject import SubjectError

        subject_of(self._config)
        if self._options.levels == ("L0",):
            return
        try:
            probe = platform_of(self._config).probe()
        except Exception:
            return  # L0 says so, and whoever needs the platform
        if getattr(probe, "state", "present") != "present":
            raise pytest.UsageError(
                f"platform {self._options.spec} is {probe.state} here: {probe.reason}"
                + (f" (fix: {probe.fix})" if probe.fix else "")
                + "; without a device only --cardan-level L0 can run"
            )
        try:
            device_info_of(self._config)
        except SubjectError as error:
            raise pytest.UsageError(str(error)) from None
        except Exception:
            return  # as above

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Label the kit's tests; those that share one opened device come after all others.

        Some devices cannot be opened twice at a time.
        """
        for item in items:
            level = getattr(getattr(item, "module", None), "LEVEL", None)
            if level in LEVELS:
                item.user_properties += [
                    (LEVEL_PROPERTY, level),
                    (ID_PROPERTY, kit_id(item.nodeid)),
                    (TITLE_PROPERTY, _title(item)),
                ]
        items.sort(key=_order)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Some tests of the levels do not run: what the others find reaches no level."""
        self._is_selection |= bool(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.failed:
            return
        name = kit_id(report.nodeid)
        level = name[len("test_") :].partition("_")[0].upper()
        if level in LEVELS:
            self._results.add(
                KitResult(
                    level=level,
                    id=name,
                    title="The tests of this module can be listed for the platform.",
                    outcome="failed",
                    reason=failure_reason(report),
                )
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = result_of(report)
        if result is not None:
            self._results.add(result)

    def pytest_keyboard_interrupt(self) -> None:
        self._is_interrupted = True

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workerinput") or not self._results.all():
            return
        from cardan.testing.conformance.badge import as_badge, as_endpoint
        from cardan.testing.conformance.report import as_json, as_markdown

        document = self._document()
        badge = self._options.badge_file
        for file, write in (
            (self._options.json_file, as_json),
            (self._options.markdown_file, as_markdown),
            (badge, as_endpoint if badge and badge.suffix == ".json" else as_badge),
        ):
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(write(document), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._results.all():
            return
        from cardan.testing.conformance.report import as_table

        document = self._document()
        terminalreporter.section(f"conformance of {document['platform']}")
        terminalreporter.write_line(as_table(document))

    def _document(self) -> dict[str, Any]:
        from cardan.testing.conformance.plugin import subject_of
        from cardan.testing.conformance.report import build_document

        return build_document(
            subject_of(self._config),
            self._results.all(),
            seed=self._options.seed,
            is_interrupted=self._is_interrupted,
            is_selection=self._is_selection,
        )


def _title(item: pytest.Item) -> str:
    text = getattr(getattr(item, "function", None), "__doc__", None) or ""
    return text.strip().partition("\n")[0].strip() or item.name


def _order(item: pytest.Item) -> tuple[bool, str]:
    level = dict(item.user_properties).get(LEVEL_PROPERTY, "")
    return _OPENED in getattr(item, "fixturenames", ()), str(level)
