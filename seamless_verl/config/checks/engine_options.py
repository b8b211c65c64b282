"""What a user gives vLLM's engines through verl: names and parsers that this vLLM has, none of them twice.

Sources: verl/workers/rollout/vllm_rollout/vllm_async_server.py `launch_server`, which makes options of
`vllm serve` of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.serve_options import name_of, no_parser, serve_options, unknown
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.engine_kwargs import KEY, given


@check
def check_engine_options(settings: Settings) -> list[Problem]:
    """Names that are options of vLLM's, each once."""
    kwargs, known = settings.get(KEY) or {}, serve_options()
    if not known or settings.get("actor_rollout_ref.rollout.name") != "vllm":
        return []
    if not isinstance(kwargs, Mapping):
        return [Problem(KEY, kwargs, "holds options by name", f"Write +{KEY}.<option>=<value>")]
    names = {str(key): name_of(f"--{key}") for key, value in kwargs.items() if _said(value)}
    twice = [name for name, count in Counter(key.replace("_", "-") for key in names).items() if count > 1]
    ways_out = {key: way_out for key, name in names.items() if (way_out := unknown(name, known)) is not None}
    reason = "is not an option of vllm serve"
    problems = [Problem(f"{KEY}.{key}", kwargs[key], reason, way_out) for key, way_out in ways_out.items()]
    problems += [Problem(KEY, name, "is written twice, with - and with _", "Keep one of them") for name in twice]
    return problems + _no_parser(kwargs)


def _said(value: object) -> bool:
    """Whether verl makes an option of it as it is named: of False it makes none, or a negated one. 0 is a value."""
    return value is not None and value is not False and value != []


def _no_parser(kwargs: Mapping[str, Any]) -> list[Problem]:
    """Engines read the parser of reasoning alone."""
    chosen, plugin = given(kwargs, "reasoning_parser"), given(kwargs, "reasoning_parser_plugin")
    if not chosen or plugin or (way_out := no_parser("reasoning-parser", str(chosen))) is None:
        return []
    return [Problem(f"{KEY}.reasoning_parser", chosen, "vLLM has no such reasoning parser", way_out)]
