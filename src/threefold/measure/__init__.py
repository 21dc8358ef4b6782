"""Parity against one process, and the pool of workers that it runs on."""
