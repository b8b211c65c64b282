"""A recorded conversation carried on: the recorded ids verbatim, then only the new messages, rendered.

How a chat template joins messages differs by model family; verl's continuous-token builders know it. A builder is
used only where it proves, on a probe conversation, that what it appends is what the template's rendering of the
whole would have there. Where none does, conversations are rendered whole.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

logger = logging.getLogger(__name__)

MARK = "0"
PROBE: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": MARK},
    {"role": "user", "content": "v"},
)
FAMILIES: tuple[tuple[str, int | None], ...] = (("auto", 1), ("default", 1), ("default", None))
"""verl's builders in the order tried, and how many tokens of a reply's end are completed before each takes over."""

VARIANTS = 64  # template settings whose builders are kept
Ids = list[int]


class Continuation:
    """Carries conversations on, for one tokenizer and its chat template (or `chat_template`, in its place)."""

    def __init__(self, tokenizer: Any, model_type: str, chat_template: str | None = None) -> None:
        self._tokenizer, self._model_type, self._template = tokenizer, model_type, chat_template
        self._joint = lru_cache(VARIANTS)(self._proven)

    def extended(
        self,
        recorded: array[int],
        messages: Sequence[Mapping[str, Any]],
        count: int,
        tools: list[dict[str, Any]] | None,
        settings: Mapping[str, Any],
    ) -> Ids | None:
        """Ids of a prompt for `messages`, of which the first `count` are recorded as these ids.

        None where it cannot be said what the template would append: render the whole then.
        """
        joint = self._joint(json.dumps(settings, sort_keys=True, default=str))
        if joint is None:
            return None
        try:
            return joint.extended(list(recorded), list(messages), count, tools)
        except ValueError as error:  # how a builder says that it does not know these messages
            logger.info("conversation rendered whole: %s", error)
            return None

    def _proven(self, settings: str) -> _Joint | None:
        given = json.loads(settings) | ({} if self._template is None else {"chat_template": self._template})
        for family, completed in FAMILIES:
            try:
                joint = _Joint(self._tokenizer, self._model_type, family, completed, given)
                if joint.agrees():
                    return joint
            except (ValueError, TemplateError) as error:  # this family's builder, or the probe, does not fit
                logger.info("continuous tokens, family %s: %s", family, error)
        logger.warning("chat template of %s: turns cannot be joined, conversations are rendered whole", settings)
        return None


class _Joint:
    """One family's builder with one setting of the template; `completed` tokens of a reply's end are ours to add."""

    def __init__(
        self, tokenizer: Any, model_type: str, family: str, completed: int | None, given: dict[str, Any]
    ) -> None:
        self._tokenizer, self._given = tokenizer, given
        self._builder = create_continuous_token_builder(
            tokenizer, model_family=family, hf_model_type=model_type, chat_template_kwargs=given
        )
        self._tail = self._reply_end()[:completed]

    def extended(
        self, recorded: Ids, messages: list[Mapping[str, Any]], count: int, tools: list[dict[str, Any]] | None
    ) -> Ids:
        """Raises ValueError for messages the builder does not know how to append."""
        ended = [*recorded, *self._tail[_overlap(recorded, self._tail) :]]
        return list(self._builder.merge_context_tokens(messages[:count], messages, ended, tools=tools).token_ids)

    def agrees(self) -> bool:
        """Whether the probe's continuation ends as the template's whole rendering of it does."""
        before = [*self._ids(PROBE[:2], True), *self._tokenizer.encode(MARK, add_special_tokens=False)]
        extended = self.extended(before, list(PROBE), 3, None)
        joined, whole = extended[len(before) :], self._ids(PROBE, True)
        return extended[: len(before)] == before and whole[-len(joined) :] == joined

    def _reply_end(self) -> Ids:
        """What the template puts after a reply: the token that ends it, and what separates it from the next."""
        _, found, tail = self._text(PROBE[:3]).rpartition(MARK)
        return list(self._tokenizer.encode(tail, add_special_tokens=False)) if found and tail else []

    def _text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **self._given))

    def _ids(self, messages: Sequence[Mapping[str, Any]], prompt: bool) -> Ids:
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, **self._given
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _overlap(recorded: Ids, tail: Ids) -> int:
    """How much of the tail is there: a reply cut short by its budget has none of it, one the model ended its first."""
    return next((size for size in range(len(tail), 0, -1) if recorded[-size:] == tail[:size]), 0)
