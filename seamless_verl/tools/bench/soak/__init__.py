"""Does a long run grow? Memory, descriptors, threads, shared memory and disk of one, over time."""
