"""What a user gives vLLM's engines through verl: names and parsers that this vLLM has, none of them twice.

Sources: verl/workers/rollout/vllm_rollout/vllm_async_server.py `launch_server`, which makes options of
`vllm serve` of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.serve_options import PARSERS, name_of, no_parser, serve_options, unknown
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.engine_kwargs import KEY, given


@check
def check_engine_options(settings: Settings) -> list[Problem]:
    """Names that are options of vLLM's, each once."""
    kwargs, known = settings.get(KEY) or {}, serve_options()
    if not known or settings.get("actor_rollout_ref.rollout.name") != "vllm":
        return []
    names = {str(key): name_of(f"--{key}") for key, value in kwargs.items() if value is not None}
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    ways_out = {key: way_out for key, name in names.items() if (way_out := unknown(name, known)) is not None}
    reason = "is not an option of vllm serve"
    problems = [Problem(f"{KEY}.{key}", kwargs[key], reason, way_out) for key, way_out in ways_out.items()]
    problems += [Problem(KEY, name, "is written twice, with - and with _", "Keep one of them") for name in twice]
    return problems + [problem for name in PARSERS if (problem := _no_parser(kwargs, name)) is not None]


def _no_parser(kwargs: Any, name: str) -> Problem | None:
    own = name.replace("-", "_")
    chosen, plugin = given(kwargs, own), given(kwargs, PARSERS[name][2].replace("-", "_"))
    if chosen is None or plugin is not None or (way_out := no_parser(name, str(chosen))) is None:
        return None
    return Problem(f"{KEY}.{own}", chosen, f"vLLM has no such {name.replace('-', ' ')}", way_out)
