"""vLLM on the host: weights that load in place, and workers that stay on the cores they were given."""
