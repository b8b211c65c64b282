"""The actor classes of the `seamless` trainer: verl's workers, which also stage weights and report their activity.

All methods of a worker run one after another in the event loop of its actor, with the exception of those in the
concurrency group `STAGING`: a report of the staging is not late because the worker computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.device import get_torch_device, set_expandable_segments
from verl.utils.import_utils import import_external_libs
from verl.workers.engine_workers import TrainingWorker

from seamless_verl import algorithms
from seamless_verl.resources.ledger.activity import Activity, DeviceUse, NodeActivity
from seamless_verl.runtime.process import show_log
from seamless_verl.trainer.checkpoints import RotatesCheckpoints
from seamless_verl.trainer.device_time import record_computations, train_device
from seamless_verl.trainer.finite_updates import FiniteUpdates, gathered
from seamless_verl.trainer.losses import CorrectedUpdates, weighs_sessions
from seamless_verl.trainer.pools import TagWorkers
from seamless_verl.trainer.positions import nest_positions_along_tokens
from seamless_verl.trainer.prefetch import FetchesAhead
from seamless_verl.trainer.shared_prefixes import ACTOR, CRITIC, REFERENCE
from seamless_verl.weights.background import (
    BackgroundStaging,
    StagingBegun,
    StagingEnd,
    exports_alone,
    hold_changes,
    without_progress_bars,
)
from seamless_verl.weights.host_copies import work_after_this
from seamless_verl.weights.seal import SealMode
from seamless_verl.weights.staging import Report, StagedWeights, StagingMemory, StagingShare, mapped_of_host
from seamless_verl.weights.transfer import node_id

algorithms.register(algorithms.LOSSES)
nest_positions_along_tokens()
STAGING = "staging"
STAGING_METHODS = ("finish_staging",)  # in that concurrency group


class SeamlessActorWorker(FetchesAhead, RotatesCheckpoints, DetachActorWorker):
    """Actor, rollout and reference on one device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        show_log()
        super().__init__(*args, **kwargs)
        self.staged, self.copying = StagingMemory(node_id()), BackgroundStaging()
        self.ranks_of_host: list[int] = []  # set when all ranks first stage together
        self.activity = Activity(f"trainer-{self.rank}", [train_device(self.rank)])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        if "rollout" in self.role:  # as verl has it while such a worker trains: lengths vary, and so do allocations
            set_expandable_segments(True)
        for worker in (getattr(self, "actor", None), getattr(self, "ref", None)):
            if worker is not None:
                record_computations(worker, self.activity)
        if "actor" in self.role:
            FiniteUpdates(self.actor, "actor")
            self.updates = CorrectedUpdates(self.actor)
            self.actor.set_loss_fn(weighs_sessions(self.updates.correcting(self.loss_fn)))
            if self.config.actor.strategy == "megatron" and self.config.actor.megatron.router_replay.mode == "R3":
                from seamless_verl.trainer.flipped_routes import FlippedRoutes

                FlippedRoutes(self.actor)
            hold_changes(self.actor.engine, self.copying.wait)
            without_progress_bars(self.actor.engine)

    def saved_engine(self) -> Any:
        return self.actor.engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def share_prefixes(self) -> dict[str, str | None]:
        """Has actor and reference compute what sequences share once from now on; what each has against it."""
        models = {ACTOR: getattr(self, "actor", None), REFERENCE: getattr(self, "ref", None)}
        return {name: share_from_now_on(model.engine) for name, model in models.items() if model is not None}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shares_prefixes(self) -> bool:
        """Whether the actor does, also after its engine has compared a first pass both ways."""
        return bool(getattr(self.actor.engine, "sharing", False))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compared_logprobs(self) -> NDArray[np.float32]:
        """What the last update's first mini-batch gave the response of the compared row, float32 [R or more];
        empty on ranks that did not have it."""
        found: NDArray[np.float32] = self.updates.compared.float().cpu().numpy()
        return found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_model_from_cpu(self, n: Any) -> None:
        self.copying.wait()
        super().restore_model_from_cpu(n)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_activity(self) -> NodeActivity:
        """The activity of the device since the last report."""
        return NodeActivity(self.activity.take(), node_id())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stage_weights(self, version: int, seal: SealMode) -> Report | StagingBegun:
        """Copies the weights out of the engine, for replicas to map or to receive; all ranks call it together.

        The first rank of a host returns the place of the host's copy, the others their share, and None those of a host
        without. A rank whose export needs no other returns StagingBegun at once, and the rest by `finish_staging`.
        """
        beside = "rollout" in self.role
        self.staged.seal = seal
        summon = {"layered_summon": self.layered_summon} if beside else {}
        with self.activity.doing(DeviceUse.SYNC):
            # Of adapters that are not merged, these alone: engines have the model's own weights from its files.
            weights, peft = self.actor.engine.get_per_tensor_param(**summon, base_sync_done=True)
            begun = self._begin_staging(every_host=beside)
            copy = partial(self._copy, version, weights, peft, begun)
            if not exports_alone(self.actor.engine):
                return copy()
        if not begun:
            return None
        self.copying.start(behind_this_thread(copy))
        return StagingBegun(self.staged.host)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def finish_staging(self) -> StagingEnd:
        """How the copy ended that `stage_weights` began, when it has; raises its error."""
        return self.copying.result()

    def _copy(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], peft: Any, begun: bool) -> Report:
        """Writes this rank's share; where this host stages nothing, takes part in the other ranks' exports."""
        with self.activity.doing(DeviceUse.SYNC):
            for name, weight in weights:
                if begun:
                    self.staged.add(name, weight)
            staged = self.staged.end(version, peft) if begun else None
            if self.actor.engine.is_param_offload_enabled:
                self.actor.engine.to("cpu", model=True, optimizer=False, grad=False)
        first = staged is None or self.ranks_of_host[0] == self.rank
        if first:
            return staged
        return StagingShare(staged.host, staged.layout, b"" if staged.seal is None else staged.seal.rows)

    def _begin_staging(self, *, every_host: bool) -> bool:
        """Begins a version with this host's other ranks; False if it stages none, as all but rank 0's do by default."""
        if not self.ranks_of_host:
            hosts = gathered(node_id())
            self.ranks_of_host = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        ranks = self.ranks_of_host
        begins = self.rank == ranks[0] and (every_host or self.rank == 0)
        place = self.staged.begin(len(ranks)) if begins else None
        if torch.distributed.get_world_size() > 1:
            place = gathered(place)[ranks[0]]
        if place is not None and not begins:
            self.staged.join(place, ranks.index(self.rank), len(ranks))
        return place is not None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def free_cached_memory(self) -> None:
        """Gives the device memory that torch keeps for later back, before an engine takes its own."""
        device = get_torch_device()
        device.synchronize()
        device.empty_cache()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def send_staged(self, version: int, staged: Sequence[StagedWeights]) -> Any:
        """Rank 0 sends the staged weights to the standalone replicas' workers; returns the transfer's metrics.

        Every rank of a host with staged weights walks the same ones: verl's nccl engine makes relays of those on rank
        0's host (`multi_sender`), and each of them must count the same buckets.
        """
        weights = iter(mapped_of_host(staged, node_id()))
        return await self.checkpoint_engine.send_weights(weights, global_steps=version)


def behind_this_thread(copy: Callable[[], Report]) -> Callable[[], Report]:
    """For another thread: the copy of what this thread's device has when it has done what is queued by now."""
    block = work_after_this()

    def copy_behind() -> Report:
        with block(), torch.no_grad():  # each thread records gradients unless it is told not to
            return copy()

    return copy_behind


class SeamlessCriticWorker(RotatesCheckpoints, TrainingWorker):
    """A critic whose model config may register engines, as the actor's does."""

    def __init__(self, config: Any) -> None:
        show_log()
        import_external_libs(config.model_config.external_lib)
        super().__init__(config)
        self.activity = Activity(f"critic-{self.rank}", [train_device(self.rank)])
        FiniteUpdates(self, "critic")
        record_computations(self, self.activity)

    def saved_engine(self) -> Any:
        return self.engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None:
        super().set_loss_fn(weighs_sessions(loss_fn))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def share_prefixes(self) -> dict[str, str | None]:
        """As the actor's worker."""
        return {CRITIC: share_from_now_on(self.engine)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_activity(self) -> NodeActivity:
        """The activity of the device since the last report."""
        return NodeActivity(self.activity.take(), node_id())


def share_from_now_on(engine: Any) -> str | None:
    """Has an engine compute what sequences share once, or returns what it has against it."""
    share = getattr(engine, "share_prefixes", None)
    return "an engine other than Megatron's, or Transformer Engine's layers" if share is None else share()


class SeamlessWorkerGroup(TagWorkers, RayWorkerGroup):
    """The workers of one resource pool; calls `on_spawn` when their processes exist, before any builds a model."""

    def __init__(
        self, *args: Any, on_spawn: Callable[[dict[str, RayWorkerGroup]], None] = lambda groups: None, **kwargs: Any
    ) -> None:
        self.on_spawn = on_spawn
        super().__init__(*args, **kwargs)

    def spawn(self, prefix_set: Any) -> dict[str, RayWorkerGroup]:
        groups: dict[str, RayWorkerGroup] = super().spawn(prefix_set)
        self.on_spawn(groups)
        return groups

    def _init_with_resource_pool(self, resource_pool: Any, ray_cls_with_init: Any, *args: Any, **kwargs: Any) -> None:
        super()._init_with_resource_pool(resource_pool, with_staging_group(ray_cls_with_init), *args, **kwargs)


def with_staging_group(made: RayClassWithInitArgs) -> RayClassWithInitArgs:
    """The same actor class with the concurrency group `STAGING`, if it has methods for it.

    verl names the methods of a class that holds several workers `<role>_<method>`.
    """
    plain = made.cls.__ray_actor_class__
    methods = [name for name in dir(plain) if name.endswith(STAGING_METHODS) and callable(getattr(plain, name))]
    if not methods:
        return made
    for name in methods:
        getattr(plain, name).__ray_concurrency_group__ = STAGING
    made.cls = ray.remote(concurrency_groups={STAGING: 1})(plain)
    return made
