"""Real servers that load and abuse are thrown at."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

# They find each other through the line above.
from load_server import ROOMY, TINY
from server_process import Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model with room for every request, one module's own server."""
    with serving(tmp_path_factory.mktemp("server") / "log", *TINY, *ROOMY) as server:
        yield server
