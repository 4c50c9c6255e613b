"""``python -m gradwire``: the same as the `gradwire` command."""

import sys

from gradwire.cli import main

sys.exit(main())
