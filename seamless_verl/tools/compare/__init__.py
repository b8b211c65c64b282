"""Compares trainers on one job: verl's own modes and ours, interleaved on the same devices, prompts and seeds.

`seamless-verl compare` is the command. The job is a recipe, a config or a workload of forced lengths. An arm is data
(`arms`), its budget is read from its composed config (`probe`, `budget`), its runs are processes (`series`, `running`),
and what they logged becomes figures (`figures`, `learning`), pairs (`comparison`), and a report (`report`, `page`).
"""
