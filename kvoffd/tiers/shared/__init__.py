"""The tier that many nodes share: blocks as objects in a store that the operator runs, such as Redis or Valkey."""
