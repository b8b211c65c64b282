"""A replica's server side: vLLM's engine as a source of token chunks, and verl's server actor that serves them."""
