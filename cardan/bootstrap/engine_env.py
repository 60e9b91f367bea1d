"""The environment that a platform wants for the engine's process, asked here or in the virtual
environment of another interpreter: ``PYTHON -m cardan.bootstrap.engine_env [PLATFORM]``.

Imports no torch.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from cardan.core.discovery import Discovery
from cardan.core.interfaces.errors import CardanError, ConfigError, PluginError
from cardan.core.platform_selection import installed_platforms, select_platform

# Imports and probes; each platform may take seconds where the disk is slow.
_PATIENCE_SECONDS = 120.0


def engine_env(platform: str | None) -> Mapping[str, str]:
    """What the platform of that name, or the best one present, asks for.

    Raises:
        CardanError: there is no such platform, or it is broken.
    """
    selection = select_platform(platform, installed_platforms(Discovery()))
    return selection.platform.child_env("engine", selection.devices)


def engine_env_elsewhere(python: str, platform: str | None) -> Mapping[str, str]:
    """``engine_env`` as the interpreter ``python`` finds it.

    Raises:
        ConfigError: ``python`` cannot be run, or has no cardan of this version.
        PluginError: its platform is missing or broken.
    """
    answer = _ask(python, platform)
    ours = version("cardan")
    if answer["version"] != ours:
        raise ConfigError(
            f"engine_python {python} has cardan {answer['version']}, this is cardan {ours}; "
            f"install the same there: {python} -m pip install cardan=={ours}"
        )
    if "error" in answer:
        raise PluginError(f"engine_python {python}: {answer['error']}")
    return {str(name): str(value) for name, value in answer["env"].items()}


def _ask(python: str, platform: str | None) -> Mapping[str, Any]:
    command = [python, "-m", __name__, *([platform] if platform else [])]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"engine_python {python} cannot be run: {error}; name the interpreter of a virtual "
            "environment that has cardan and the platform, such as /path/to/venv/bin/python"
        ) from error
    lines = done.stdout.splitlines()
    try:
        answer = json.loads(lines[-1]) if lines and done.returncode == 0 else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or "version" not in answer:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ConfigError(
            f"engine_python {python} has no usable cardan ({said[-1] if said else 'no answer'}); "
            f"install it there: {python} -m pip install cardan=={version('cardan')}"
        )
    return answer


def main(arguments: list[str]) -> int:
    answer: dict[str, object] = {"version": version("cardan")}
    try:
        answer["env"] = dict(engine_env(arguments[0] if arguments else None))
    except CardanError as error:
        answer["error"] = str(error)
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
