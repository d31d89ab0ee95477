"""Benchmarks of inference servers: one policy, more and more clients."""
