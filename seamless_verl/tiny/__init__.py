"""Models, a tokenizer and tasks that are small enough to be made in seconds and trained on one core."""

from seamless_verl.tiny.models import SIZES, ModelSize, keep_or_make_model, make_model
from seamless_verl.tiny.task import make_arithmetic
from seamless_verl.tiny.tokenizer import make_tokenizer

__all__ = ["SIZES", "ModelSize", "keep_or_make_model", "make_arithmetic", "make_model", "make_tokenizer"]
