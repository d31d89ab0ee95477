"""Collectors with workers on other machines."""
