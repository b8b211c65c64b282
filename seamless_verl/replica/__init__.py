"""A replica's server side: vLLM's engine as a source of deltas, and verl's server actor with a door to it."""
