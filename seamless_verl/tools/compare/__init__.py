"""Compares trainers on one job: verl's own modes and ours, interleaved on the same devices, prompts and seeds.

`seamless-verl compare` is the command. An arm is data (`arms`), its budget is read from its composed config (`probe`,
`budget`), its runs are processes (`running`), and what they logged becomes figures (`figures`), statistics of pairs
(`statistics`), and a report (`report`, `page`). `grid` repeats arms over permitted staleness and learning rates; what
staleness then brings and costs is in `learning`, `targets`, `lengths` and `frontier`.
"""
