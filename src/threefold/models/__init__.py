"""Plain single-device PyTorch modules; not a line of parallel code."""
