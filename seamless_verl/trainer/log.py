"""This package's log in Ray's processes.

Importing vLLM's API server imports model-hosting-container-standards, which sets the root logger and its handlers to
errors alone, so that what is logged through the root logger is lost from then on.
"""

from __future__ import annotations

import logging
import os
import sys

NAME = __name__.partition(".")[0]


def show_log(level: str = "WARNING") -> None:
    """Show it as verl shows its own: on standard error, from VERL_LOGGING_LEVEL up. Again changes nothing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    log = logging.getLogger(NAME)
    log.handlers, log.propagate = [handler], False
    log.setLevel(os.environ.get("VERL_LOGGING_LEVEL", level))
