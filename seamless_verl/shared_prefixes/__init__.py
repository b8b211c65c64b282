"""What sequences of a micro-batch share is computed once, with the gradients of computing it for each.

`layout.py` merges the sequences, `forward.py` passes them through Megatron's GPT, and the attention of the plain layers
takes a forest. `platform/megatron/shared_prefixes.py` has verl's engine call it, or says what is not proven: so far a
dense model of text in plain layers, without model parallelism and adapters. Critics compute each sequence by itself.
Groups that verl's balancing puts into different micro-batches, or ranks, share nothing.
"""
