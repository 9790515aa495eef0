"""Blocks as things one can hold: read them in the pool itself, write them, export and import them."""
