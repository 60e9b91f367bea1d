"""``python -m cardan``: the command line."""

import sys

from cardan.cli.main import main

sys.exit(main())
