"""verl's sender of weights to an engine on its host, with an end to its patience.

It waits for a receipt of each bucket. An engine that was killed meanwhile gives none: the load, and the trainer that
waits for it, would wait for ever, in a call that blocks the whole process. Here it fails, and the trainer goes on
without that replica.
"""

from __future__ import annotations

from typing import Any

import zmq
from verl.workers.rollout.vllm_rollout import vllm_rollout
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from seamless_verl.errors import HostMovedError
from seamless_verl.trainer.host import WRITTEN_FOR

NAME = BucketedWeightSender.__name__


class BoundedSender(BucketedWeightSender):  # type: ignore[misc]
    """A bucket that is not taken within `patience_s` seconds, in which any engine loads one, is taken by nobody."""

    patience_s = 300.0

    async def async_send_weights(self, weights: Any) -> None:
        """Raises TimeoutError when the engine does not take a bucket."""
        try:
            await super().async_send_weights(weights)
        except zmq.Again as late:
            raise TimeoutError(f"the engine has taken no weights for {self.patience_s:g} s") from late

    def _init_socket(self) -> None:
        super()._init_socket()
        for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
            self.socket.setsockopt(option, int(1000 * self.patience_s))
        self.socket.setsockopt(zmq.LINGER, 0)


def bound_transfers() -> None:
    """Have every load of this process send so.

    Raises:
        HostMovedError: verl's rollout has another sender.
    """
    if NAME not in vars(vllm_rollout):
        raise HostMovedError("bounded-transfers", f"{vllm_rollout.__name__}:{NAME}", WRITTEN_FOR, "no such name")
    setattr(vllm_rollout, NAME, BoundedSender)
