"""``python -m lightning_stream`` is ``lightning-stream``."""

import sys

from lightning_stream.cli import main

sys.exit(main(prog="python -m lightning_stream"))
