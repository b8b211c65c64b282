"""Megatron-core and its bridges on host tensors over gloo, with tensor, pipeline and data parallelism."""
