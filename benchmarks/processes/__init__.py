"""Benchmarks of several processes: collectors, env stepping, starting and weights."""
