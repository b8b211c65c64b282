"""A plan as JSON, for other programs to read."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from seamless_verl.resources.plan import Plan

FORMAT = 1


def plan_to_json(plan: Plan) -> str:
    return json.dumps({"format": FORMAT, "plan": _plain(plan)}, indent=1)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
