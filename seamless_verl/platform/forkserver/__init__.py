"""Ray's workers forked from a process that has imported everything already.

A run starts a dozen processes, and each would spend six seconds of a core on the same imports: on a
host, where a core is a device, that was half of a start-up. Ray starts a worker by a command of our
choice (`runtime_env.py_executable` in config/platform/cpu.yaml), `launcher.py`, which asks the zygote
for a fork. It gets one when the imports are over: a fork made earlier would import the rest once more,
beside the zygote and for itself alone. Whatever a fork spawns with multiprocessing, as a server of vLLM
its engine, is given to a launcher likewise.
"""
