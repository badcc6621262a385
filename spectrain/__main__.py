"""``python -m spectrain`` is the command ``spectrain``."""

import sys

from spectrain.cli import main

sys.exit(main())
