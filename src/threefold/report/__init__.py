"""Text that a person reads: the explanation of a job (pure)."""
