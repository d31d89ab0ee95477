"""Collectors whose workers are nodes."""
