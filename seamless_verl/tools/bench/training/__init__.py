"""Compares whole training jobs: verl's own trainer modes and ours, on the same devices, prompts and lengths.

`python -m seamless_verl.tools.bench.training --help` says how.
"""
