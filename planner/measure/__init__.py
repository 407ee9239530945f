"""Trials on a real device: each in a fresh process, a configuration in as JSON, what was measured out as JSON."""
