"""The trainer: data, optimizer, learning rate, metrics, launching and watching ranks."""
