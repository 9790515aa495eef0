"""Tiers: where blocks live beside the pool. Each is one implementation of ``Tier``; the pool itself is none."""
