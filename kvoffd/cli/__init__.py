"""The daemon's command line: ``kvoffd serve``, ``kvoffd config``, ``kvoffd --version``."""

from kvoffd.cli.app import main

__all__ = ["main"]
