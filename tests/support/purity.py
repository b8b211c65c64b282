"""What takes seconds to import, and so is not imported where only a setting or a record is looked at."""

from __future__ import annotations

HEAVY = ("torch", "ray", "verl", "vllm", "megatron", "mbridge", "transformers", "transfer_queue")
