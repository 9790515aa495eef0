"""``kvoffd`` with a tick for about each prompt of a made-up day, as in a real one: ``serve.py serve ...``."""

import sys

import kvoffd.server.daemon
from kvoffd.cli import main

TICK_S = 0.004

if __name__ == "__main__":
    kvoffd.server.daemon.TICK_S = TICK_S
    sys.exit(main(sys.argv[1:]))
