"""Whether a recipe learns alike under two trainers: the same job over several seeds, and its validation rewards."""
