"""Whole training runs on one device: both hand-overs, and verl's own modes beside ours."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from statistics import median
from typing import Any

from support.job import AGENT, Job

from gpu.nvml import Samples, sampling
from gpu.place import Place, SkippedError

STEPS, MODE_STEPS, SKIPPED_STEPS = 5, 8, 2
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
REPORTED = re.compile(
    r"^(timing_s/(step|gen|update_actor|update_weights|old_log_prob)|perf/(throughput|max_memory_\w+)|lending/(?!.*/).*"
    r"|seamless/device/(train|rollout|switch|sync|idle)_share|seamless/commit/.*"
    r"|training/rollout_(logprob_diff_(max|mean)|actor_probs_pearson_corr)|tokens/.*|actor/perf/max_memory.*)$"
)
LOG_END = 1500


class DeviceJob(Job):
    """A run on this place's device, by a user's command."""

    place: Place

    def command(self) -> list[str]:
        command = super().command()
        options = {"platform": "accelerator_without_te"} if self.place.cuda else {}
        return [*command, *(f"{key}={value}" for key, value in options.items())]


def options_of(place: Place) -> dict[str, Any]:
    """Sizes: on the card 64 prompts x 8 of up to 512 tokens, on the CPU a handful; weights hardly move, so that the
    logprobs of a step's second half are still close to those of the version that generated it."""
    if not place.cuda:
        return {f"{ACTOR}.optim.lr": 1e-6}
    return {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "data.train_batch_size": 64,
        "data.max_response_length": 512,
        f"{ACTOR}.ppo_mini_batch_size": 64,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ROLLOUT}.n": 8,
        f"{ROLLOUT}.max_model_len": 640,
        f"{ROLLOUT}.max_num_seqs": 256,
        f"{ROLLOUT}.gpu_memory_utilization": 0.35,
        f"{ROLLOUT}.enforce_eager": False,
        "trainer.n_gpus_per_node": 1,
    }


def environment_of(place: Place) -> dict[str, str]:
    """Of the run's processes; `Job` sets those of the CPU platform, which these undo on the card."""
    undone = {"VERL_PLATFORM": "", "TORCHDYNAMO_DISABLE": "0", "OMP_NUM_THREADS": "4"} if place.cuda else {}
    return place.environment() | undone


def run(place: Place, name: str, **overrides: Any) -> dict[int, dict[str, float]]:
    """One run; reports its metrics, and what the driver saw. Returns the metrics by step."""
    from seamless_verl.tiny import make_arithmetic

    data = place.folder / "data"
    if not data.exists():
        make_arithmetic(data, 0, 1024, 64)
        (data / "model").symlink_to(place.model)
    options = options_of(place) | {key.replace("__", "."): value for key, value in overrides.items()}
    job = DeviceJob(place.folder / name, data, options, environment_of(place))
    job.place = place
    with sampling() if place.cuda else nullcontext(Samples()) as samples:
        try:
            job.start().finish(timeout=600)
        except BaseException:
            sys.stderr.write(job.log()[-LOG_END:])
            raise
    metrics = job.metrics()
    last = {key: value for step in sorted(metrics) for key, value in metrics[step].items() if REPORTED.match(key)}
    steps = [metrics[step]["timing_s/step"] for step in sorted(metrics) if "timing_s/step" in metrics[step]]
    place.report(name, steps=steps, nvml=samples.figures(), last=last)
    return metrics


def five_steps(place: Place, handover: str, **overrides: Any) -> dict[str, float]:
    """Five steps without a failed call; trainer and engine agree at the first one. Returns the last one's metrics."""
    steps = run(
        place,
        handover,
        seamless__handover=handover,
        seamless__max_staleness=1,
        trainer__total_training_steps=STEPS,
        trainer__v1__seamless__parameter_sync_step=2,
        actor_rollout_ref__actor__ppo_mini_batch_size=32 if place.cuda else 4,
        actor_rollout_ref__rollout__free_cache_engine=handover != "resident",
        **overrides,
    )
    assert set(steps) == set(range(1, STEPS + 1)), sorted(steps)
    last = steps[STEPS]
    assert last["calls/failed"] == last["fleet/dead"] == 0
    assert steps[1]["training/rollout_actor_probs_pearson_corr"] > 0.99
    if handover != "resident":
        assert last["lending/returned"] >= 1
    return last


def check_resident(place: Place) -> None:
    five_steps(place, "resident")


def check_cache_only(place: Place) -> None:
    """With agents on the gateway, so that there is an account of the tokens: each trained, or dropped with a reason."""
    last = five_steps(place, "cache_only", **AGENT | {"data__max_response_length": 256 if place.cuda else 32})
    dropped = sum(value for key, value in last.items() if key.startswith("tokens/dropped/"))
    assert last["tokens/generated"] == last["tokens/trained"] + dropped > 0, "the account of the tokens is not closed"


def check_released(place: Place) -> None:
    five_steps(place, "released")


def check_modes(place: Place) -> None:
    """The same work under three trainer modes: medians of a step's seconds and of verl's tokens a second."""
    figures = {}
    for mode in ("seamless", "sync", "colocate_async"):
        metrics = run(
            place,
            mode,
            trainer__v1__trainer_mode=mode,
            trainer__total_training_steps=MODE_STEPS,
            seamless__max_staleness=1,
        ) if mode == "seamless" else run(
            place, mode, trainer__v1__trainer_mode=mode, trainer__total_training_steps=MODE_STEPS
        )  # fmt: skip
        later = [metrics[step] for step in sorted(metrics) if step > SKIPPED_STEPS]
        if not later:
            raise SkippedError(f"{mode}: {len(metrics)} steps are too few to compare")
        figures[mode] = {
            name: median(step[key] for step in later)
            for name, key in (("step_s", "timing_s/step"), ("tokens_per_s", "perf/throughput"))
            if all(key in step for step in later)
        }
    place.report("modes", **figures)
