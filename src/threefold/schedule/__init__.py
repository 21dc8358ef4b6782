"""Pipeline schedules as data: actions, generators, lowering, checker, text grammar (pure)."""
