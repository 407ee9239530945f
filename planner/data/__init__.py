"""The user's data: read as a stream, sampled where it is large, and what its lengths decide."""
