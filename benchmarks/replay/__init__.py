"""Benchmarks of replay buffers: collecting in the background, and the buffer by itself."""
