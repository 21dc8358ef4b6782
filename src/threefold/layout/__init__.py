"""Integers only: rank <-> coordinate, groups, layers -> stages, global slices of shards (pure)."""
