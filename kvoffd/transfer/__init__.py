"""How bytes move between engines and the pool: layouts and plans (pure), engines (threads), and checksums."""
