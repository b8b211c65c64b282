"""The command `seamless-verl`: what a person asks of a run from a terminal. Pure: nothing heavy is imported."""
