"""The administrator's command line: ``kvoffd-cli``."""

from kvoffd_client.cli.app import main

__all__ = ["main"]
