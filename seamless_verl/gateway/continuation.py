"""Continues a recorded conversation: the recorded ids verbatim, then only the new messages, rendered.

verl's continuous-token builders know how a model family's template joins messages. A builder is used only when it
proves, on a probe conversation, that what it appends is what the template renders there for the whole conversation.
Without such a builder, conversations are rendered whole.

An agent may put text behind a reply, in the same message, such as the stop string that ended it. Then the reply's ids
that say the beginning of the message are kept, and its rest is tokenized.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from jinja2 import TemplateError
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from seamless_verl.gateway.prefix_index import ExtendedReply, PrefixMatch

logger = logging.getLogger(__name__)

PROBE_REPLY = "0"
PROBE: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": PROBE_REPLY},
    {"role": "user", "content": "v"},
)
FAMILIES: tuple[tuple[str, int | None], ...] = (("auto", 1), ("default", 1), ("default", None))
"""verl's builders in the order tried, and how many of the tokens that end a reply we add before each; None is all."""

MAX_SETTINGS = 64  # template settings whose builders are kept
Ids = list[int]


class Continuation:
    """Continues conversations for one tokenizer and its chat template, or `chat_template` instead."""

    def __init__(self, tokenizer: Any, model_type: str, chat_template: str | None = None) -> None:
        self._tokenizer, self._model_type, self._template = tokenizer, model_type, chat_template
        self._builder = lru_cache(MAX_SETTINGS)(self._find_builder)

    def extend(
        self,
        recorded: array[int],
        messages: Sequence[Mapping[str, Any]],
        count: int,
        tools: list[dict[str, Any]] | None,
        settings: Mapping[str, Any],
    ) -> Ids | None:
        """Ids of a prompt for `messages`, of which the first `count` are recorded as these ids.

        None when it is not known what the template would append: then render the whole conversation.
        """
        builder = self._builder(json.dumps(settings, sort_keys=True, default=str))
        if builder is None:
            return None
        try:
            return builder.extend(list(recorded), list(messages), count, tools)
        except ValueError as error:  # the builder does not support these messages
            logger.info("conversation rendered whole: %s", error)
            return None

    def rejoin(self, extended: ExtendedReply) -> PrefixMatch | None:
        """The ids of a reply as far as they say what the agent sent back, with those of the rest of its message.

        None when the reply's place in the text of its ids is not certain, or the rest's ids say another text there.
        """
        reply, sent = extended.reply, extended.sent
        generated = reply.prefix.tail[-reply.generated :].tolist()
        decode = partial(self._tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text = decode(generated)
        thoughts = text.find(reply.reasoning) + len(reply.reasoning)
        if text.count(reply.text, thoughts) != 1:
            return None
        begin, kept = text.index(reply.text, thoughts), len(generated)
        while not sent.startswith((shown := text[begin:]).rstrip()):
            kept -= 1
            text = decode(generated[:kept])
        rest = sent[len(shown) :] if sent.startswith(shown) else sent[len(shown.rstrip()) :].lstrip()
        while rest and kept and decode(generated[: kept - 1]) == text:  # by a token that ends a turn
            kept -= 1
        rest_ids = list(self._tokenizer.encode(rest, add_special_tokens=False))
        exact = partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
        if exact([*generated[:kept], *rest_ids]) != exact(generated[:kept]) + rest:
            return None
        return PrefixMatch(extended.count, reply.prefix.without_last(len(generated) - kept), rest_ids)

    def _find_builder(self, settings: str) -> _ContinuationBuilder | None:
        kwargs = json.loads(settings) | ({} if self._template is None else {"chat_template": self._template})
        for family, end_tokens in FAMILIES:
            try:
                builder = _ContinuationBuilder(self._tokenizer, self._model_type, family, end_tokens, kwargs)
                if builder.matches_template():
                    return builder
            except (ValueError, TemplateError) as error:  # the template does not fit this builder, or the probe
                logger.info("continuous tokens, family %s: %s", family, error)
        logger.warning("chat template of %s: turns cannot be joined, conversations are rendered whole", settings)
        return None


class _ContinuationBuilder:
    """verl's builder of one family, with one setting of the template.

    Of the tokens that end a reply, the first `end_tokens` are added here when the reply lacks them.
    """

    def __init__(
        self, tokenizer: Any, model_type: str, family: str, end_tokens: int | None, template_kwargs: dict[str, Any]
    ) -> None:
        self._tokenizer, self._template_kwargs = tokenizer, template_kwargs
        self._builder = create_continuous_token_builder(
            tokenizer, model_family=family, hf_model_type=model_type, chat_template_kwargs=template_kwargs
        )
        self._reply_end = self._find_reply_end()[:end_tokens]

    def extend(
        self, recorded: Ids, messages: list[Mapping[str, Any]], count: int, tools: list[dict[str, Any]] | None
    ) -> Ids:
        """Raises ValueError for messages that the builder cannot append."""
        ended = [*recorded, *self._reply_end[_overlap(recorded, self._reply_end) :]]
        return list(self._builder.merge_context_tokens(messages[:count], messages, ended, tools=tools).token_ids)

    def matches_template(self) -> bool:
        """Whether the probe's continuation ends as the template's rendering of the whole probe does."""
        recorded = [*self._ids(PROBE[:2], True), *self._tokenizer.encode(PROBE_REPLY, add_special_tokens=False)]
        extended = self.extend(recorded, list(PROBE), 3, None)
        appended, whole = extended[len(recorded) :], self._ids(PROBE, True)
        return extended[: len(recorded)] == recorded and whole[-len(appended) :] == appended

    def _find_reply_end(self) -> Ids:
        """What the template puts after a reply: the token that ends it, and what separates it from the next message."""
        _, found, tail = self._text(PROBE[:3]).rpartition(PROBE_REPLY)
        return list(self._tokenizer.encode(tail, add_special_tokens=False)) if found and tail else []

    def _text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **self._template_kwargs))

    def _ids(self, messages: Sequence[Mapping[str, Any]], prompt: bool) -> Ids:
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, **self._template_kwargs
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _overlap(recorded: Ids, reply_end: Ids) -> int:
    """How many tokens of the reply's end are recorded: none for a reply that its budget cut, else at least one."""
    sizes = range(len(reply_end), 0, -1)
    return next((size for size in sizes if recorded[-size:] == reply_end[:size]), 0)
