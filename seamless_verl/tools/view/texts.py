"""The text of tokens, by the tokenizer's own file; without one, why there is no text."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "tokenizer.json"
INCOMPLETE = "\ufffd"  # what decoders give for a character that lacks some of its bytes
LEAD = 6  # tokens decoded before each one: some are written differently at the beginning of a text


@dataclass(frozen=True)
class Texts:
    """`tokenizer` is one of the package tokenizers, None if there is none; then `missing` says why."""

    tokenizer: Any = None
    missing: str = ""

    @classmethod
    def load(cls, model: str | None) -> Texts:
        """The tokenizer of a model's folder, or of a model that the cache of transformers has."""
        if model is None:
            return cls(missing="The run's folder does not name its model. Give the folder with --model.")
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ModuleNotFoundError:
            return cls(missing="Tokens have no text here: the package tokenizers is not installed.")
        path = Path(model) / FILE if Path(model).is_dir() else cached(model)
        if path is None or not path.is_file():
            return cls(missing=f"Tokens have no text: {model} has no {FILE} here. Give a folder with --model.")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the package raises nothing more special
            return cls(missing=f"Tokens have no text: {path} cannot be read: {error}")

    def decode(self, ids: Sequence[int]) -> str:
        """Their text, special tokens included; "" without a tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """The text of each token after those `before` it. A character of several tokens is the last one's."""
        if self.tokenizer is None:
            return [""] * len(ids)
        lead = list(before[-LEAD:])
        whole = [*lead, *ids]
        begin, done, pieces = 0, len(lead), list[str]()
        for end in range(len(lead) + 1, len(whole) + 1):
            read, text = self.decode(whole[begin:done]), self.decode(whole[begin:end])
            if text.endswith(INCOMPLETE) and end - done < LEAD and end < len(whole):
                pieces.append("")
                continue
            if done == len(lead):
                read = read.rstrip(INCOMPLETE)  # the bytes that it lacks may follow
            pieces.append(text[len(read) :])
            begin, done = max(begin, done - LEAD), end
        return pieces


def cached(name: str) -> Path | None:
    """The tokenizer's file of a model's public name, if it was downloaded before."""
    try:
        hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        return None
    try:
        found = hub.try_to_load_from_cache(name, FILE)
    except ValueError:  # it is no name of a model
        return None
    return Path(found) if isinstance(found, str) else None
