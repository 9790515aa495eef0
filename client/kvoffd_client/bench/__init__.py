"""Measures a running daemon: every result beside a floor, what the machine can do at best, measured in the same run."""
