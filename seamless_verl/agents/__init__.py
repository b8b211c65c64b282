"""Users' own agents, run against a session: a Python callable or a command line. Pure asyncio."""
