"""Numbers: FLOPs, seconds, bytes on each link and bytes of memory of every strategy (pure)."""
