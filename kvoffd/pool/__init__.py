"""The pool: its memory, the slots in it, and the table that describes them."""
