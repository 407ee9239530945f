"""The fastest way to train a model in the GPU memory you have."""
