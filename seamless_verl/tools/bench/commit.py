"""Measures what a weight commit costs: `python -m seamless_verl.tools.bench.commit`.

The engines are stubs without a model. All else is the product's: the data plane, the commit with its background loads,
the staging in shared memory, and in each replica's process the mapping and the load plan, into parameters of the
model's size. A row is the median of several commits:

- standstill: for how long an engine paused, by its own process; the median and the longest of the replicas;
- on a core: the part of the median replica's pause for which it had a core. The rest it waited for one;
- total: from the call of the commit until the last replica had loaded;
- wait: until the trainer went on, and its share of the total;
- held: from the call until its weights may change. An optimizer step that comes sooner waits for the rest of that.

The trainer's ranks copy in threads, as they do where a rank has the whole model. With `--foreground` the trainer waits
for the copy, as it does elsewhere.

A replica has copy engines of its own, which are cores here, so `--at-once` matters: with 1 a load has the machine's
memory and a core to itself; with as many as there are cores loads share the memory's speed; with more also the cores.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import OmegaConf

from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.data_plane.client import DataPlaneClient, PlacedReplica
from seamless_verl.tools.bench.commit_processes import STAGING, BenchServer, BenchTrainer
from seamless_verl.tools.bench.shared import bench_parser, numbers
from seamless_verl.weights.background import StagingBegun
from seamless_verl.weights.commit import WeightCommit
from seamless_verl.weights.seal import SealMode
from seamless_verl.weights.staging import StagedWeights, StagingShare
from seamless_verl.weights.update import CommitTimes

WARM_UP = 3  # commits: memory is made in the first, and mapped in the next
ROLLOUT = {"max_num_seqs": 64, "max_model_len": 64, "prompt_length": 32, "response_length": 32}
CONFIG = {"actor_rollout_ref": {"model": {"path": ""}, "rollout": ROLLOUT}, "trainer": {"default_local_dir": ""}}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
TITLES = (
    *("parameters", "at once", "replicas", "standstill, ms: median", "longest", "on a core"),
    *("total, ms", "trainer's wait, ms", "share", "weights held, ms"),
)


@dataclass(frozen=True)
class CommitCost:
    """One measured setting; times in milliseconds, medians over the commits."""

    parameters: int
    replicas: int
    ranks: int
    at_once: int
    standstill_median_ms: float
    standstill_max_ms: float
    cpu_ms: float
    total_ms: float
    wait_ms: float
    wait_share: float
    held_ms: float

    @classmethod
    def of(
        cls,
        sizes: tuple[int, int, int, int],
        times: Sequence[CommitTimes],
        waits: Sequence[float],
        cpu_s: Sequence[Sequence[float]],
    ) -> CommitCost:
        """`sizes` are the first four fields; `waits` are seconds of the trainer, and `cpu_s` of each commit is the time
        on a core of each replica's pause."""
        return cls(
            *sizes,
            milliseconds([median(one.pauses_s) for one in times]),
            milliseconds([max(one.pauses_s) for one in times]),
            milliseconds([median(one) for one in cpu_s]),
            milliseconds([one.total_s for one in times]),
            milliseconds(waits),
            round(median(wait / one.total_s for wait, one in zip(waits, times, strict=True)), 3),
            milliseconds([one.stage_s for one in times]),
        )

    @property
    def line(self) -> str:
        """A row of a table in Markdown, with TITLES."""
        cells = (
            *(f"{self.parameters / 1e6:g}M", self.at_once, self.replicas),
            *(self.standstill_median_ms, self.standstill_max_ms, self.cpu_ms),
            *(self.total_ms, self.wait_ms, f"{self.wait_share:.0%}", self.held_ms),
        )
        return f"| {' | '.join(map(str, cells))} |"


def milliseconds(seconds: Sequence[float]) -> float:
    return round(1e3 * median(seconds), 1)


class BenchTrainers:
    """The trainer's worker group, as far as a commit needs it."""

    def __init__(self, ranks: int, *, in_background: bool) -> None:
        made = ray.remote(concurrency_groups={STAGING: 1})(BenchTrainer)
        self.workers = [made.options(num_cpus=0).remote() for _ in range(ranks)]
        self.in_background = in_background

    def stage_weights(self, version: int, seal: SealMode) -> list[StagedWeights | StagingShare | StagingBegun]:
        ranks = len(self.workers)
        ray.get([worker.set_seal.remote(seal) for worker in self.workers])
        place = ray.get(self.workers[0].begin.remote(ranks)) if ranks > 1 else None
        ranked = enumerate(self.workers)
        return list(ray.get([one.stage.remote(version, place, i, ranks, self.in_background) for i, one in ranked]))

    def finish_staging(self) -> list[Any]:
        return [worker.finish.remote() for worker in self.workers]

    def step(self, value: float) -> None:
        ray.get([worker.step.remote(value) for worker in self.workers])


class CommitBench:
    """A job's data plane, its trainer and its replicas, which serve all rows."""

    def __init__(self, replicas: int, ranks: int, *, in_background: bool) -> None:
        self.servers = [ray.remote(BenchServer).options(num_cpus=0).remote(i) for i in range(replicas)]
        self.trainers = BenchTrainers(ranks, in_background=in_background)
        self.client = DataPlaneClient(OmegaConf.create(CONFIG), SeamlessConfig(restarts=0))
        self.placed = [
            PlacedReplica(SimpleNamespace(server_handle=server, replica_rank=i), False, (f"rollout-{i}",))
            for i, server in enumerate(self.servers)
        ]
        self.client.attach(self.placed, keep_kv=False)
        self.version = 0

    def measure(self, parameters: int, replicas: int, *, at_once: int, number: int) -> CommitCost:
        """Commits `number` versions after the warm-up; every replica must then have the last one's weights."""
        servers, workers = self.servers[:replicas], self.trainers.workers
        times, waits, cpu_s = list[CommitTimes](), list[float](), list[list[float]]()
        ray.get([server.set_up.remote(0) for server in self.servers])  # memory of the row before
        ray.get([actor.set_up.remote(parameters) for actor in (*servers, *workers)])
        group: Any = self.trainers
        placed = {one.replica_id: one for one in self.placed[:replicas]}

        def pauses_s(ids: Sequence[str]) -> list[float]:
            """Seconds for which each of these replicas paused."""
            servers = [placed[name].replica.server_handle for name in ids if name in placed]
            return list(ray.get([server.last_pause_s.remote() for server in servers]))

        commit = WeightCommit(
            execute=self.client.actor.execute.remote,
            metrics=lambda loading: self.client.actor.checked_metrics.remote(loading=loading),
            pauses_s=pauses_s,
            trainers=group,
            sharing={},
            others=list(placed),
            at_once=at_once,
            hosts=self.client.hosts,
        )
        for _ in range(WARM_UP + number):
            self.version += 1
            self.trainers.step(float(self.version))
            commit.begin(self.version)
            waits.append(commit.times.before_commit_s)
            commit.wait()
            times.append(commit.times)
            cpu_s.append(ray.get([server.last_cpu_s.remote() for server in servers]))
        found = ray.get([server.values.remote() for server in servers])
        assert found == [{float(self.version)}] * replicas, f"version {self.version} is not in all replicas: {found}"
        sizes = (parameters, replicas, len(workers), at_once)
        return CommitCost.of(sizes, times[WARM_UP:], waits[WARM_UP:], cpu_s[WARM_UP:])


@contextmanager
def started(replicas: int, ranks: int, *, in_background: bool) -> Iterator[CommitBench]:
    """The processes of a bench, in a Ray cluster of its own."""
    ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": ENVIRONMENT})
    try:
        made = CommitBench(replicas, ranks, in_background=in_background)
        yield made
        made.client.stop()
    finally:
        ray.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser("commit", __doc__)
    parser.add_argument("--parameters", type=numbers, default=[3_000_000, 30_000_000, 300_000_000])
    parser.add_argument("--replicas", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer on this host, which divide the staging")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--at-once", type=numbers, default=sorted({1, cores}), help="loads side by side")
    parser.add_argument("--commits", type=int, default=9, help="measured, after a warm-up")
    parser.add_argument("--foreground", action="store_true", help="the trainer waits for the copy")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    args = parser.parse_args(arguments)
    if not args.json:
        sys.stdout.write(f"| {' | '.join(TITLES)} |\n|{' ---: |' * len(TITLES)}\n")
    with started(max(args.replicas), args.ranks, in_background=not args.foreground) as made:
        for parameters, at_once, replicas in product(args.parameters, args.at_once, args.replicas):
            row = made.measure(parameters, replicas, at_once=at_once, number=args.commits)
            sys.stdout.write(f"{json.dumps(asdict(row)) if args.json else row.line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
