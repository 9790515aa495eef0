"""Blocks as things one can hold: read them in the pool itself, write and pin them, export and import them."""
