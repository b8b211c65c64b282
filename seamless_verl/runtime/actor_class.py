"""An actor class that is started by somebody else's code, with arguments of ours."""

from __future__ import annotations

from typing import Any


class ActorClassWith:
    """Stands in for a Ray actor class: whoever starts it gives `more` arguments by name without knowing of them."""

    def __init__(self, actor_class: Any, **more: Any) -> None:
        self.actor_class, self.more = actor_class, more

    def options(self, **options: Any) -> ActorClassWith:
        return ActorClassWith(self.actor_class.options(**options), **self.more)

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return self.actor_class.remote(*arguments, **named, **self.more)
