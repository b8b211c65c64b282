"""What must be known of a fleet to go on with it: in another process after a death, or after contact was lost.

A server knows the version of its weights and whether it stands still. What it cannot know is noted here: whether
somebody vouches for those weights, and who wanted it to stand still.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.routing import ReplicaView
from seamless_verl.rollout.states import DEAD, PAUSED, SERVING, STALE, ReplicaState


@dataclass
class Noted:
    """A replica after the last command. SERVING also stands for PAUSED; only then `version` is known.

    `lost`: there was no contact with it during that command, of which it therefore has seen nothing.
    """

    state: ReplicaState
    version: int | None = None
    lost: bool = False


@dataclass
class Notes:
    """`held` replicas stand still because training has their device, `still` ones because another plane is about to
    stop them; `parted` is the last order to part, and the answer to it."""

    committed: int = 0
    held: set[str] = field(default_factory=set)
    still: set[str] = field(default_factory=set)
    parted: tuple[int, list[str]] = (0, [])
    replicas: dict[str, Noted] = field(default_factory=dict)

    def take(self, view: Iterable[ReplicaView], committed: int) -> None:
        """Note how things stand after a command."""
        self.committed = committed
        for one in view:
            if one.state is not DEAD:
                state = SERVING if one.state is PAUSED else one.state
                self.replicas[one.replica_id] = Noted(state, one.version)
            elif one.replica_id in self.replicas:
                self.replicas[one.replica_id].lost = True

    def state_of(self, replica_id: str, version: int, paused: PauseMode | None) -> tuple[ReplicaState, int | None]:
        """The state, with its version, of a replica whose server says that it has these weights and is paused so.

        One that was out of reach while a version was committed would be refitted by nobody: only the committed
        version is vouched for then. One that was reached may be an older one whose turn in an update is yet to come.
        """
        noted = self.replicas.get(replica_id, Noted(STALE))
        if noted.state is not SERVING:
            return noted.state, None
        if noted.version != version or (noted.lost and version != self.committed):
            return STALE, None
        return (SERVING if paused is None else PAUSED), version
