"""Compares what a recipe learns under several trainers: the same job over several seeds, and its validation rewards."""
