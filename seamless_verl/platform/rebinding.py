"""verl's names that `PPOTrainer._setup` builds from, replaced for the length of one call.

verl names its worker group inside a long method and offers no factory. Rebinding the module's name
while that method runs, in the one process that runs the `seamless` trainer, is the smallest door;
every other mode and process sees verl unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from seamless_verl.errors import HostMovedError

WRITTEN_FOR = "verl 0.9.1"


@contextmanager
def rebound(module: ModuleType, **names: Any) -> Iterator[None]:
    """Bind `names` in `module` for the length of the block, then restore what was there.

    Raises:
        HostMovedError: the module has no such name any more.
    """
    missing = [name for name in names if name not in vars(module)]
    if missing:
        raise HostMovedError("seamless-trainer", f"{module.__name__}:{missing[0]}", WRITTEN_FOR, "no such name")
    before = {name: vars(module)[name] for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def plain_class(actor_class: Any) -> type:
    """The class behind `ray.remote`, which cannot itself be subclassed."""
    return getattr(actor_class, "__ray_actor_class__", actor_class)  # type: ignore[no-any-return]
