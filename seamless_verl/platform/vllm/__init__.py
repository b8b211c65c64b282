"""vLLM on the host: weights that can be loaded in place, and workers pinned to the cores of their devices."""
