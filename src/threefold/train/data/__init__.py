"""Data: text to token files, and the order in which their samples are trained on. Nothing here imports torch."""
