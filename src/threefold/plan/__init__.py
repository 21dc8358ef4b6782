"""Chooses the strategy: the space of candidates, the search, the advice in words, and the job file of a plan (pure)."""
