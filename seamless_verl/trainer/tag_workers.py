"""Worker groups on machines that are not alike, which verl's own take for so many copies of the first."""

from __future__ import annotations

from typing import Any

from verl.single_controller.ray.base import RayResourcePool

from seamless_verl.trainer.pools import TagResourcePool


class TagWorkers:
    """Mixed into a RayWorkerGroup: ranks follow the pool's machines, as many on each as it has devices."""

    def _init_with_resource_pool(
        self: Any,
        resource_pool: RayResourcePool,
        ray_cls_with_init: Any,
        bin_pack: bool,
        detached: bool,
        worker_env: dict[str, str] | None = None,
    ) -> None:
        if not isinstance(resource_pool, TagResourcePool):
            super()._init_with_resource_pool(  # type: ignore[misc]
                resource_pool, ray_cls_with_init, bin_pack, detached, worker_env
            )
            return
        self.resource_pool = resource_pool
        groups = resource_pool.get_placement_groups(device_name=self.device_name)
        self._world_size = resource_pool.world_size
        self._get_master_addr_port(groups[0], bundle_index=0, master_port_range=self._ray_master_port_range)
        rank = 0
        for index, (group, count) in enumerate(zip(groups, resource_pool.store, strict=True)):
            for local_rank in range(count):
                self._create_worker(
                    rank=rank,
                    pg_idx=index,
                    pg=group,
                    local_rank=local_rank,
                    resource_pool=_OneMachine(resource_pool, count),
                    ray_cls_with_init=ray_cls_with_init,
                    worker_env=worker_env,
                    detached=detached,
                )
                rank += 1


class _OneMachine:
    """A pool as `_create_worker` reads it, with the devices of one machine first: it takes them for every one's."""

    def __init__(self, pool: RayResourcePool, count: int) -> None:
        self.world_size, self.use_gpu, self.store = pool.world_size, pool.use_gpu, [count]
        self.max_colocate_count = pool.max_colocate_count
