"""Measures what a weight commit costs; see `__main__`."""
