"""Numbers: what each axis sends, when and how often (pure)."""
