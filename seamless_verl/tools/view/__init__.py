"""The live view: a page that shows what a run does, during the run and after it.

It reads the files in the run's folder and never asks a process of the run, so nothing of a run depends on it:
`folder` finds the files, `run` reads them, `server` serves what was read and the page in `assets`.
"""
