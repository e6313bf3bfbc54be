"""Callbacks and checkpoints for frameworks that own the training loop."""
