"""What a user gives vLLM's engines through verl: names and parsers that this vLLM has, none of them twice.

Sources: verl/workers/rollout/vllm_rollout/vllm_async_server.py `launch_server`, which makes options of
`vllm serve` of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.serve_options import PARSERS, name_of, no_parser, serve_options
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.engine_kwargs import KEY, given
from seamless_verl.config.schema import nearest


@check
def check_engine_options(settings: Settings) -> list[Problem]:
    """Names that are options of vLLM's, each once."""
    kwargs, known = settings.get(KEY) or {}, serve_options()
    if not known or settings.get("actor_rollout_ref.rollout.name") != "vllm":
        return []
    names = {str(key): name_of(f"--{key}") for key in kwargs}
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    problems = [_unknown(key, kwargs[key], known) for key, name in names.items() if name not in known]
    problems += [Problem(KEY, name, "is written twice, with - and with _", "Keep one of them") for name in twice]
    return problems + [problem for name in PARSERS if (problem := _no_parser(kwargs, name)) is not None]


def _unknown(key: str, value: Any, known: frozenset[str]) -> Problem:
    near = nearest(name_of(f"--{key}"), sorted(known)).partition("? Valid")
    hint = f"{near[0]}? " if near[1] else ""
    return Problem(f"{KEY}.{key}", value, "is no option of vllm serve", f"{hint}`vllm serve --help=all` lists them")


def _no_parser(kwargs: Any, name: str) -> Problem | None:
    own = name.replace("-", "_")
    chosen, plugin = given(kwargs, own), given(kwargs, PARSERS[name][2].replace("-", "_"))
    if chosen is None or plugin is not None or (way_out := no_parser(name, str(chosen))) is None:
        return None
    return Problem(f"{KEY}.{own}", chosen, f"vLLM has no such {name.replace('-', ' ')}", way_out)
