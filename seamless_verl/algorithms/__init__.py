"""Corrections for tokens of older weights: losses, masks and step sizes beside verl's own, one method a file."""
