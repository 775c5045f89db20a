"""`python -m actors`."""

import sys

from actors.cli import main

sys.exit(main())
