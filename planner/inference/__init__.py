"""Inference plans: the same idea as for training, with passes instead of steps."""
