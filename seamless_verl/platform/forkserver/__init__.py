"""Forkserver: Ray's workers as forks of one process that has imported everything already.

A run starts a dozen processes, and each would spend six seconds of a core on the same imports. On a host, where a core
is a device, that was half of a start-up. Ray starts each worker by a command of our choice
(`runtime_env.py_executable` in config/platform/cpu.yaml). That command is `launcher.py`, which asks the forkserver
(`server.py`) for a fork. The fork (`worker.py`) is made when the imports are over: an earlier one would import the rest
once more, for itself alone. What a fork spawns with multiprocessing, as a vLLM server its engine, is forked likewise.
"""
