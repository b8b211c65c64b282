"""A byte-level tokenizer with a chat template: 256 bytes, a few markers, no merges.

Token id `b` below 256 is the byte `b`, so a text costs one token a byte and any UTF-8 text survives the
round trip exactly. Every id up to `VOCAB_SIZE` names a token, so whatever an untrained model samples can
be decoded. Role names are single tokens and a turn ends exactly at `<|im_end|>`, which is also the
end-of-sequence token: a generated turn followed by the next message is, id for id, what the template
renders for the whole conversation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

VOCAB_SIZE = 384
"""A multiple of 128, so neither Megatron nor vLLM pads it, whole or split over two devices."""

PAD, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
CONTROL_TOKENS = (PAD, "<|im_start|>", END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
"""Left out when decoding with `skip_special_tokens`."""

MARKUP_TOKENS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<tools>", "</tools>", "<think>", "</think>"),
)
"""One token each, but part of the text: tool parsers and reward functions must see them."""

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def token_id(token: str) -> int:
    """The id of one of `CONTROL_TOKENS` or `MARKUP_TOKENS`."""
    return 256 + (*CONTROL_TOKENS, *MARKUP_TOKENS).index(token)


def make_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer, with its chat template (system, user, assistant, tool; tools and tool calls)."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(),
        pad_token=PAD,
        eos_token=END_OF_TURN,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )


def _byte_level() -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    spare = VOCAB_SIZE - 256 - len(CONTROL_TOKENS) - len(MARKUP_TOKENS)
    reserved = [f"<|reserved_{n}|>" for n in range(spare)]
    tokens = [
        *(AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS),
        *(AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS),
        *(AddedToken(token, special=True, normalized=False) for token in reserved),
    ]
    for token in tokens:
        # Singly, because a batch is numbered with its special tokens apart from the others.
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
    return tokenizer


def _byte_symbols() -> dict[str, int]:
    """The printable character that byte-level tokenizers use for each byte, numbered by the byte's value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(256 + rank): byte for rank, byte in enumerate(others)}
