"""Copies between engines and the pool: layouts and plans (pure), copy engines (threads), and checksums."""
