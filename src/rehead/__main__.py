"""`python -m rehead`."""

import sys

from rehead.cli import main

sys.exit(main())
