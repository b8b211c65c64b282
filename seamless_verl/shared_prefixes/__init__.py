"""What sequences of a micro-batch share is computed once, with the gradients of computing it for each.

`layout.py` merges the sequences, `forward.py` passes them through Megatron's GPT, and the attention of the plain layers
takes a forest. `packing.py` fills micro-batches with families, and `ranks.py` gives each rank whole groups of its
mini-batch. `platform/megatron/shared_prefixes.py` has verl's engines call it, those of actor, reference and critic, or
says what is not proven. Proven are dense models of text in plain layers, with data, tensor, sequence and pipeline
parallelism. Before its first pass an engine is asked both ways for a few sequences.
"""
