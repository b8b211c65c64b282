"""SeamlessFlow as a verl plugin: a data plane for unmodified agents and tag-based scheduling of machines."""

__version__ = "0.1.0"
