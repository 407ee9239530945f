"""Memory: sizes as polynomials of micro-batch and length, replayed through a model of the CUDA allocator."""
