"""The disk tier: blocks in a preallocated file, read and written past the page cache."""
