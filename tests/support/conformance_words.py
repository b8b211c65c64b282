"""What the points of the suite say to the model, and how an untrained model is made to say something.

A grammar with one choice leaves only the spelling to the model; a bias towards tokens that are markup makes it spell
those as a trained model does, with one token each. Both are vLLM's own parameters, and both servers take them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from seamless_verl.tiny.tokenizer import END_OF_TURN, MARKUP_TOKENS, token_id

T = TypeVar("T")
HI = [{"role": "user", "content": "hi"}]
HI_TOKENS = 7  # <|im_start|><|user|>hi<|im_end|><|im_start|><|assistant|>
TALE = [{"role": "user", "content": "tell me a tale"}]
LONG = {"ignore_eos": True}
NO_BLANKS = {str(ord(blank)): -100 for blank in " \t\n\r"}
"""A bias. JSON allows blanks between anything, and an untrained model may never come to an end of them."""

ENDS = NO_BLANKS | {str(token_id(END_OF_TURN)): 100}
"""A bias with which the model also ends as soon as its grammar allows it."""

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["m", "km"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}
CALLED = {"unit": "km", "exact": True}
ARGUMENTS: dict[str, Any] = {"type": "object", "enum": [CALLED, {"unit": "m", "exact": False}]}
"""Objects of PARAMETERS, with no room for blanks."""

TOOL = {"type": "function", "function": {"name": "measure", "description": "measures", "parameters": ARGUMENTS}}
OTHER_TOOL = {"type": "function", "function": {"name": "rest", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "measure", "arguments": {"unit": "km", "exact": true}}</tool_call>'


def says(text: str) -> dict[str, Any]:
    """`extra_body` of a chat in which the model says exactly this."""
    marked = {str(token_id(token)): 100 for token in MARKUP_TOKENS if token in text}
    return {"structured_outputs": {"choice": [text]}, **({"logit_bias": marked} if marked else {})}


def thinks_then_says(text: str) -> dict[str, Any]:
    """Reasons for some tokens, ends that, and says the text; with a seed, since the reasoning is sampled."""
    bias = {str(token_id("</think>")): 4, str(token_id(END_OF_TURN)): -100}
    bias |= {str(token_id(token)): -100 for token in MARKUP_TOKENS if token != "</think>"}
    return {
        "structured_outputs": {"choice": [text]},
        "logit_bias": bias,
        "chat_template_kwargs": {"enable_thinking": True},
    }


def ending(ask: Callable[[int], T], over: Callable[[T], bool]) -> T:
    """The first sampled reply that ends as it should: after a call that it had to make, say, an untrained model makes
    about as often another."""
    return next(reply for reply in map(ask, range(40)) if over(reply))


def conforms(value: Any) -> bool:
    """To PARAMETERS."""
    return set(value) == {"unit", "exact"} and value["unit"] in ("m", "km") and isinstance(value["exact"], bool)
