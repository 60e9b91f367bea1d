"""cardan's own version, as its metadata states it."""

from importlib.metadata import PackageNotFoundError, version


def cardan_version() -> str:
    """The installed version; a checkout that was never installed has none."""
    try:
        return version("cardan")
    except PackageNotFoundError:
        return "0 (not installed; in a checkout run: pip install -e .)"
