"""The doors: how training programs hand their gradients to the runtime."""
