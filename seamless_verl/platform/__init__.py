"""The CPU platform: everything that lets the same stack run without an accelerator, in one place.

Nothing here is imported on an accelerator beyond `plugin`, which registers the platform's name.
"""
