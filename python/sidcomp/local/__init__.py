"""Training on each rank's own: the ranks exchange what their optimizers did, not gradients."""
