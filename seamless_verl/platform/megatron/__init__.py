"""Megatron-core and mbridge on host tensors over gloo, with tensor, pipeline and data parallelism."""
