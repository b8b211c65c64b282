"""Measures what the gateway costs: a stub engine called directly, through the gateway, and through the LiteLLM proxy.

`python -m seamless_verl.tools.bench.gateway` measures all three in one run, interleaved, and prints a table.
"""
