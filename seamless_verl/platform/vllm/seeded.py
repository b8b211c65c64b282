"""Requests with a seed whose prefill is cut into chunks.

vLLM samples for every request of a batch, also for one whose prompt is not all computed yet, discards that token,
and sets the request's generator back by an offset, which the generators of accelerators have. The CPU's has none,
and its engine ends with an error. Here the generator's whole state is put back instead, before vLLM asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class HostModelRunner(CPUModelRunner):  # type: ignore[misc]
    """vLLM's runner on the CPU, whose seeded requests draw once for each token that they keep."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        before = [(generator, generator.get_state()) for generator in self._discarded().values()]
        output = super()._sample(*args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, which finds no generator to set back."""
        put_back = self._discarded()
        for index in put_back:
            del self.input_batch.generators[index]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(put_back)

    def _discarded(self) -> dict[int, torch.Generator]:
        """Generators of the requests whose sampled token will not be kept, by their place in the batch."""
        (places,) = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        generators = self.input_batch.generators
        return {int(place): generators[int(place)] for place in places if int(place) in generators}
