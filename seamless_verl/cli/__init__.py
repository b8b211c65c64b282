"""The command `seamless-verl`: plans or inspects a run from a terminal. It imports no heavy package."""
