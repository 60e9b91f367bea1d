"""The engine's loop on the fake device; its builder is shared with the unit tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))
