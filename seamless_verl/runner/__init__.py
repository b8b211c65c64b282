"""A process outside of a run that asks it for tasks over HTTP, and runs agents on them."""
