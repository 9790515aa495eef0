"""Between the pool and the tiers below it: what goes down and when, what comes up again, and how much at once."""
