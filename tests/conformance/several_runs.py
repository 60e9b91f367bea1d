"""Runs the kit several times in one process, which imports torch and the kit's modules but once.

``python several_runs.py FILE``: the file holds a list of ``[command line, environment]`` in JSON.
"""

import json
import os
import sys
from pathlib import Path


def main(file):
    import pytest

    for line, environment in json.loads(Path(file).read_text()):
        os.environ.update(environment)
        pytest.main(line)


if __name__ == "__main__":
    main(sys.argv[1])
