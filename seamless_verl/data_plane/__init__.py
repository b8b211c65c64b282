"""Where the gateway meets verl: an actor that runs it, and agent loops that run agents against it."""
