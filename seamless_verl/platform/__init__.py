"""The CPU platform: everything that lets the same stack run without an accelerator, in one place.

On an accelerator only `plugin`, which registers the platform's name, and `adaptation`, which the trainer uses too, are
imported; and with `platform=accelerator_without_te` also `engine_without_te` and what it needs of `megatron`.
"""
