"""Checks for a machine with one NVIDIA card: `scripts/gpu_check` runs them, pytest does not collect them."""
