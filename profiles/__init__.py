"""Shipped data, read with importlib.resources; no code."""
