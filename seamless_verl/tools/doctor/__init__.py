"""What is wrong with this machine and this environment, before any run: findings, each with its way out.

`gather.py` reads the facts, and nothing else here looks at the machine: each probe is a function of them.
"""
