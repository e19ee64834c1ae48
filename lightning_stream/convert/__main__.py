"""``python -m lightning_stream.convert``."""

import sys

from lightning_stream.convert.command_line import main

sys.exit(main())
