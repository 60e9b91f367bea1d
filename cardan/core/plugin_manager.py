"""Plugins of the group ``cardan.plugins``: loading them, and calling their hooks safely."""

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import pluggy

from cardan.core.config.plugins import PluginConfig
from cardan.core.constraint_solver import owned_constraints
from cardan.core.discovery import KERNELS, PLUGINS, Discovery, Entry, describe, unknown_name
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.errors import ConfigError, PluginError
from cardan.core.interfaces.hooks import PROJECT, HookSpecs
from cardan.core.interfaces.kernels import OpSpec, Provider
from cardan.core.interfaces.platform import ConfigView
from cardan.core.interfaces.scheduling import RequestView

logger = logging.getLogger(__name__)

PluginState = Literal["loaded", "blocked", "failed"]
HOOK_PREFIX = "cardan_"
# Limits of what travels to the server every second.
MAX_GAUGES = 256
MAX_REASON = 500
_GAUGE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """One installed plugin. ``file`` is where its code lies, once imported; ``reason`` says why it
    is not loaded."""

    name: str
    distribution: str
    version: str
    file: str
    state: PluginState
    reason: str = ""


class PluginManager:
    """Loads plugins, each under a guard of its own, and calls their hooks one plugin at a time.

    A plugin that cannot be used is logged once and left out, unless it is required. A hook that
    raises is logged once for each plugin and hook; the other plugins, and the engine, go on.
    """

    def __init__(self, config: PluginConfig, discovery: Discovery) -> None:
        """Load what is installed and not blocked.

        Raises:
            ConfigError: a plugin is both required and blocked.
            PluginError: a required plugin is missing or fails.
        """
        self._config = config
        self._discovery = discovery
        # One pluggy manager a plugin keeps each plugin's errors apart from the others'.
        self._managers: dict[str, pluggy.PluginManager] = {}
        self._plugins: dict[str, Any] = {}
        self._statuses: list[PluginStatus] = []
        # Hook -> one caller for each plugin that implements it, in pluggy's order.
        self._callers: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
        self._reported: set[tuple[str, str]] = set()
        self._check_names(discovery)
        for entry in discovery.entries(PLUGINS):
            self._load(entry, discovery)
        self._bind_hooks()

    def plugins(self) -> tuple[PluginStatus, ...]:
        """All installed plugins and what became of them."""
        return tuple(self._statuses)

    def implements(self, hook: str) -> bool:
        """Whether any plugin implements ``hook``; a caller on a busy path asks once."""
        return bool(self._callers.get(hook))

    def constraints(self, config: ConfigView) -> tuple[Constraint, ...]:
        """All plugins' demands on the configuration, with their owners filled in."""
        found: list[Constraint] = []

        def take(name: str, value: Any) -> None:
            found.extend(owned_constraints(value, f"plugin {name}"))

        self._collect("cardan_constrain", take, config=config)
        return tuple(found)

    def ops(self) -> tuple[OpSpec, ...]:
        """Operations that plugins add."""
        return tuple(self._collect_items("cardan_ops", OpSpec))

    def kernels(self, platform: str, device: DeviceInfo) -> tuple[Provider, ...]:
        """Kernel providers that plugins add for a device of ``platform``: those of the hook, then
        those of the group ``cardan.kernels``."""
        found = self._collect_items("cardan_kernels", Provider)
        for name in self.kernel_packs(platform):
            try:
                pack = self._discovery.load(KERNELS, name)
                found += _checked_items(pack(device), Provider)
            except Exception as error:
                reason = str(error) if isinstance(error, PluginError) else describe(error)
                if name in self._config.required:
                    raise PluginError(f"required kernels {name} failed: {reason}") from error
                if (name, KERNELS) not in self._reported:
                    self._reported.add((name, KERNELS))
                    logger.warning("kernels %s are not used: %s", name, reason)
        return tuple(found)

    def kernel_packs(self, platform: str) -> tuple[str, ...]:
        """Entries ``PLATFORM.NAME`` of the group ``cardan.kernels`` that are for ``platform`` and
        not blocked; nothing is imported."""
        return tuple(
            name
            for name in self._discovery.names(KERNELS)
            if name.partition(".")[0] == platform and name not in self._config.blocked
        )

    def cli_options(self) -> dict[str, str]:
        """Settings that plugins take, with their help."""
        options: dict[str, str] = {}
        self._collect("cardan_cli_options", lambda _, value: options.update(value))
        return options

    def check_options(self, options: Mapping[str, str]) -> None:
        """Raise ``ConfigError`` when no plugin takes one of ``options``."""
        if not options:
            return
        known = self.cli_options()
        for name in options:
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f", did you mean {near[0]}?" if near else ""
                raise ConfigError(
                    f"no loaded plugin takes the option {name!r}{hint} "
                    f"(known: {', '.join(sorted(known)) or 'none'})"
                )

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call an observing hook of all plugins."""
        for name, caller in self._callers.get(hook, ()):
            try:
                caller(**arguments)
            except Exception as error:
                self._report(name, hook, error)

    def admit(self, request: RequestView) -> str | None:
        """The first plugin's reason to refuse ``request``, or None.

        A plugin that was to judge and failed has not admitted: that refuses the request, too.
        """
        hook = "cardan_request_admit"
        for name, caller in self._callers.get(hook, ()):
            try:
                reason = caller(request=request)
            except Exception as error:
                self._report(name, hook, error)
                return f"plugin {name} failed to check the request"
            if reason is not None:
                return str(reason)
        return None

    def health(self) -> tuple[str, ...]:
        """Reasons why plugins hold the engine unhealthy, each with the plugin's name."""
        reasons = []
        for name, value in self._ask("cardan_health"):
            if value is not None:
                reasons.append(f"plugin {name}: {' '.join(str(value)[:MAX_REASON].split())}")
        return tuple(reasons)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Gauges by plugin and name. What is not a number or has an unusable name is left out and
        reported once for each plugin."""
        gauges: dict[str, dict[str, float]] = {}
        for plugin, value in self._ask("cardan_metrics"):
            try:
                numbers = {key: float(number) for key, number in dict(value or {}).items()}
                _check_gauges(numbers)
            except (TypeError, ValueError) as error:
                self._report(plugin, "cardan_metrics", error)
            else:
                gauges[plugin] = numbers
        return gauges

    def _check_names(self, discovery: Discovery) -> None:
        installed = discovery.names(PLUGINS)
        both = sorted(set(self._config.required) & set(self._config.blocked))
        if both:
            raise ConfigError(f"plugin {both[0]} is both required and blocked; choose one")
        known = (*installed, *discovery.names(KERNELS))
        for name in self._config.required:
            if name not in known:
                raise PluginError(
                    f"required {unknown_name('plugin', name, known)}; "
                    "install the package that provides it"
                )
        for name in self._config.blocked:
            if name not in known:
                logger.warning("blocked %s", unknown_name("plugin", name, known))

    def _load(self, entry: Entry, discovery: Discovery) -> None:
        if entry.name in self._config.blocked:
            self._note(entry, "", "blocked", "blocked by plugins.blocked")
            return
        if any(status.name == entry.name for status in self._statuses):
            return  # the other distribution's entry has reported that the name is ambiguous
        file = ""
        try:
            plugin = discovery.load(PLUGINS, entry.name)
            file = _file_of(plugin)
            plugin = _instance_of(entry, plugin)
            self._managers[entry.name] = check_plugin(entry.name, plugin)
        except PluginError as error:
            if entry.name in self._config.required:
                raise PluginError(f"required plugin {entry.name} failed: {error}") from error
            logger.warning("plugin %s is not used: %s", entry.name, error)
            self._note(entry, file, "failed", str(error))
            return
        self._plugins[entry.name] = plugin
        self._note(entry, file, "loaded", "")

    def _note(self, entry: Entry, file: str, state: PluginState, reason: str) -> None:
        self._statuses.append(
            PluginStatus(entry.name, entry.distribution, entry.version, file, state, reason)
        )

    def _bind_hooks(self) -> None:
        manager = _new_manager()
        for name, plugin in self._plugins.items():
            manager.register(plugin, name)
        for hook, caller in vars(manager.hook).items():
            names = [implementation.plugin_name for implementation in caller.get_hookimpls()]
            # pluggy calls the last of its list first.
            self._callers[hook] = [
                (name, _single_result(getattr(self._managers[name].hook, hook)))
                for name in reversed(names)
            ]

    def _ask(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Each plugin's answer; those that raise are reported and left out."""
        answers = []
        for name, caller in self._callers.get(hook, ()):
            try:
                answers.append((name, caller(**arguments)))
            except Exception as error:
                self._report(name, hook, error)
        return answers

    def _collect(self, hook: str, take: Callable[[str, Any], None], **arguments: Any) -> None:
        """Hand each plugin's contribution to ``take``; a required plugin must not fail."""
        for name, caller in self._callers.get(hook, ()):
            try:
                value = caller(**arguments)
                if value is not None:
                    take(name, value)
            except Exception as error:
                if name in self._config.required:
                    raise PluginError(
                        f"required plugin {name} failed in {hook}: {describe(error)}"
                    ) from error
                self._report(name, hook, error)

    def _collect_items(self, hook: str, kind: type) -> list[Any]:
        found: list[Any] = []

        def take(_: str, value: Any) -> None:
            found.extend(_checked_items(value, kind))

        self._collect(hook, take)
        return found

    def _report(self, name: str, hook: str, error: Exception) -> None:
        if (name, hook) in self._reported:
            return
        self._reported.add((name, hook))
        logger.warning(
            "plugin %s failed in %s: %s; further failures there are not logged",
            name,
            hook,
            describe(error),
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )


def check_plugin(name: str, plugin: object) -> pluggy.PluginManager:
    """Check all hooks of a plugin object against their specifications.

    Returns a pluggy manager that holds this plugin alone.

    Raises:
        PluginError: a hook or an argument is unknown (the nearest is suggested), a hook is not
            marked with ``hookimpl``, or it is a wrapper.
    """
    known = [hook for hook in vars(HookSpecs) if hook.startswith(HOOK_PREFIX)]
    manager = _new_manager()
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"plugin {name}: {_explain(manager, plugin, known, error)}") from error
    implemented = set()
    for hook in manager.get_hookcallers(plugin) or ():
        implemented.add(hook.name)
        for implementation in hook.get_hookimpls():
            if implementation.hookwrapper or implementation.wrapper:
                raise PluginError(
                    f"plugin {name}: {hook.name} is a wrapper; plugins are called one by one, "
                    "so there is nothing to wrap"
                )
    for attribute in dir(plugin):
        if attribute.startswith(HOOK_PREFIX) and attribute not in implemented:
            if not callable(getattr(plugin, attribute, None)):
                continue
            raise PluginError(
                f"plugin {name}: {attribute} is not marked with "
                "cardan.core.interfaces.hooks.hookimpl, so it would never be called"
            )
    return manager


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    return manager


def _single_result(caller: pluggy.HookCaller) -> Callable[..., Any]:
    """A call of the only plugin behind ``caller``; returns its own result."""
    if caller.spec is not None and caller.spec.opts.get("firstresult"):
        return caller

    def call(**arguments: Any) -> Any:
        results = caller(**arguments)
        return results[0] if results else None

    return call


def _explain(
    manager: pluggy.PluginManager, plugin: object, known: list[str], error: Exception
) -> str:
    """What is wrong with a plugin's hooks, with the nearest right name."""
    for hook in dir(plugin):
        if manager.parse_hookimpl_opts(plugin, hook) is None:
            continue
        if hook not in known:
            near = get_close_matches(hook, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            return f"there is no hook {hook}, {hint}"
        wanted = list(inspect.signature(getattr(HookSpecs, hook)).parameters)[1:]
        for argument in inspect.signature(getattr(plugin, hook)).parameters:
            if argument not in wanted:
                near = get_close_matches(argument, wanted, 1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(wanted)}"
                return f"{hook} has no argument {argument}, {hint}"
    return " ".join(str(error).split())


def _checked_items(value: Iterable[Any], kind: type) -> list[Any]:
    items = list(value)
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"expected {kind.__name__} objects, got {item!r}")
    return items


def _check_gauges(gauges: Mapping[str, float]) -> None:
    if len(gauges) > MAX_GAUGES:
        raise ValueError(f"{len(gauges)} gauges, at most {MAX_GAUGES} are taken from one plugin")
    for name in gauges:
        if not isinstance(name, str) or not _GAUGE_NAME.fullmatch(name):
            raise ValueError(
                f"the gauge name {name!r} must have 1 to 100 letters, digits and underscores, "
                "and no digit first"
            )


def _instance_of(entry: Entry, plugin: Any) -> Any:
    if not isinstance(plugin, type):
        return plugin
    try:
        return plugin()
    except Exception as error:
        raise PluginError(f"cannot make {entry}: {describe(error)}") from error


def _file_of(plugin: object) -> str:
    module = plugin if inspect.ismodule(plugin) else inspect.getmodule(plugin)
    if module is None:
        module = inspect.getmodule(type(plugin))
    return str(getattr(module, "__file__", None) or "")
