"""Searches layouts of machines by simulation: tags, replica sizes, local updates of a step, permitted staleness.

First every layout has a bound: the step if its devices never waited. The best of them are simulated with the production
policies, and around the best of those updates and staleness are varied. Of plans within WORTH of the fastest the
one with the least staleness is best: old tokens cost samples, which a simulation of time does not see. A plan becomes
settings of a run, and the best ones arms of a comparison.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from seamless_verl.config.roles import ROLLOUT_KEY
from seamless_verl.resources.lending.policy import Tag
from seamless_verl.resources.placement import verl_fields
from seamless_verl.resources.tags import KEY as RESOURCES
from seamless_verl.resources.tags import MachineGroup, Resources
from seamless_verl.tools.simulator.engine import SimulatedUse
from seamless_verl.tools.simulator.machine import MachineProfile
from seamless_verl.tools.simulator.scenario import BOTH, ROLLOUT, TRAIN, Scenario, Scheduler, SimulatedWorkload
from seamless_verl.tools.simulator.simulate import Result, simulate

WORTH = 0.02
LOOKS = 20  # decisions of the policy a step, at most, while training waits
SHARES = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)
SIMULATED = 12  # layouts, at most
SEED = 1


@dataclass(frozen=True)
class Unit:
    """A replica of `size` devices with its machine's times; `seats` calls run at once."""

    size: int
    machine: MachineProfile
    seats: int


@dataclass(frozen=True)
class PlanCandidate:
    """`training` units train, of which all generate too if `shared`; `generating` units only generate."""

    unit: Unit
    training: int
    generating: int
    shared: bool
    updates: int = 1
    max_staleness: int = 1
    sizes: tuple[int, int] | None = None  # the trainer's TP and PP, where they follow from an accelerator's memory
    memory: str = "-"  # the peak of a device, in words

    @property
    def trainer(self) -> str:
        """The trainer's parallel sizes, in words."""
        return f"TP {self.sizes[0]} x PP {self.sizes[1]}" if self.sizes else "-"

    @property
    def devices(self) -> tuple[frozenset[str], ...]:
        return ((BOTH if self.shared else TRAIN),) * self.training + (ROLLOUT,) * self.generating

    @property
    def place(self) -> tuple[int, ...]:
        """The layout with its sizes."""
        return self.unit.size, self.training, self.generating, int(self.shared)

    @property
    def layout(self) -> str:
        return "disaggregated" if not self.shared else "multiplexed" if self.generating else "colocated"

    @property
    def tags(self) -> str:
        size, tags = self.unit.size, "train+rollout" if self.shared else "train"
        only = f", {self.generating * size} rollout" if self.generating else ""
        return f"{self.training * size} {tags}{only}"


@dataclass(frozen=True)
class Prediction:
    """A candidate with its simulated result; tokens/s count prompts and replies."""

    candidate: PlanCandidate
    result: Result

    @property
    def tokens_per_s(self) -> float:
        return self.result.tokens_per_s

    def share(self, *kinds: SimulatedUse, of: tuple[bool, ...] = (True, False)) -> float:
        """The share of time of these kinds; `of` says whether it is of units that train, and of the others."""
        pairs = zip(self.candidate.devices, self.result.shares.values(), strict=True)
        shares = [sum(share[kind] for kind in kinds) for tags, share in pairs if (Tag.TRAIN in tags) in of]
        return sum(shares) / len(shares) if shares else 0.0


def layouts(units: int, unit: Unit, step: int = 1) -> Iterator[PlanCandidate]:
    """The layouts of so many units; the parts that train are multiples of `step` units, as of a machine."""
    yield PlanCandidate(unit, units, 0, shared=True)
    parts = {max(1, round(units * share / step)) * step for share in SHARES}
    for training in sorted(part for part in parts if part < units):
        for shared in (True, False):
            yield PlanCandidate(unit, training, units - training, shared=shared)


def bound_s(candidate: PlanCandidate, workload: SimulatedWorkload, tokens: float, read: float) -> float:
    """Seconds of a step in which no unit waits; `tokens` are generated and `read` otherwise, in a step."""
    machine, calls = candidate.unit.machine, workload.prompts * workload.samples
    generates = candidate.generating + (candidate.training if candidate.shared else 0)
    running = max(1, min(candidate.unit.seats, calls // generates))
    length = (tokens + read) / calls
    decode_s = (
        machine.decode_s(running) + machine.context_token_s * max(0.0, length / 2 - machine.rates_context) * running
    )
    generation = tokens * decode_s / running
    training = machine.train_s(round(tokens + read), calls, workload.repeated_tokens)
    parts = [(generation + training) / (candidate.training + candidate.generating), training / candidate.training]
    if not candidate.shared:
        parts.append(generation / candidate.generating)
    return max(parts) + machine.sync_s


@dataclass(frozen=True)
class Search:
    """What is searched: `stalenesses` and local `updates` to try, in runs of so many `steps`.

    `keep_cache`: as `seamless.weights.kv=keep` has it.
    """

    workload: SimulatedWorkload
    stalenesses: tuple[int, ...] = (1, 2, 4)
    updates: tuple[int, ...] = (1, 2, 4)
    steps: int = 12
    keep_cache: bool = False

    def run(
        self, candidates: Sequence[PlanCandidate], *, progress: Callable[[str], None] = lambda _: None
    ) -> list[Prediction]:
        """Predictions, the best first."""
        tokens, read = self.step_tokens()
        ranked = sorted(candidates, key=lambda c: bound_s(c, self.workload, tokens, read))[:SIMULATED]
        first = self.stalenesses[min(1, len(self.stalenesses) - 1)]
        found: dict[tuple[int, ...], Prediction] = {}

        def predict(candidate: PlanCandidate) -> Prediction:
            key = *candidate.place, candidate.updates, candidate.max_staleness
            if key not in found:
                progress(f"{len(found) + 1}: {candidate.layout}, {candidate.tags}")
                found[key] = self._predict(candidate, bound_s(candidate, self.workload, tokens, read))
            return found[key]

        tried = [predict(replace(candidate, updates=self.updates[0], max_staleness=first)) for candidate in ranked]
        for near in sorted(tried, key=lambda p: -p.tokens_per_s)[:3]:
            best = max(
                (predict(replace(near.candidate, updates=n)) for n in self.updates), key=lambda p: p.tokens_per_s
            )
            for staleness in self.stalenesses:
                predict(replace(best.candidate, max_staleness=staleness))
        return ordered(list(found.values()))

    def _predict(self, candidate: PlanCandidate, step_s: float) -> Prediction:
        scheduler = Scheduler(
            max_staleness=candidate.max_staleness,
            updates=candidate.updates,
            ahead=(candidate.max_staleness + 1) // 2,  # with which `seamless.ahead=null` begins
            keep_cache=self.keep_cache,
            look_s=step_s / LOOKS,
            policy="marginal" if candidate.shared else "never",
            carry=not candidate.shared,
        )
        machine = replace(candidate.unit.machine, host_s=candidate.unit.machine.host_s / candidate.updates)
        run = Scenario(
            self.workload, candidate.devices, scheduler, machine, seats=candidate.unit.seats, steps=self.steps,
            warmup=self.steps // 4, seed=SEED,
        )  # fmt: skip
        return Prediction(candidate, simulate(run))

    def step_tokens(self) -> tuple[float, float]:
        """Generated and other tokens of a step, on the mean of some steps."""
        groups = range(max(1, -(-1000 // self.workload.samples)))
        samples = [turns for number in groups for turns in self.workload.group(SEED, number)]
        scale = self.workload.prompts * self.workload.samples / len(samples)
        read = sum(self.workload.prompt_tokens + sum(t.tool_tokens for t in turns[:-1]) for turns in samples)
        return scale * sum(turn.tokens for turns in samples for turn in turns), scale * read


def ordered(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The best first: of those within WORTH of the fastest the one of the least staleness, then by tokens/s."""
    fastest = max(p.tokens_per_s for p in predictions)
    near = [p for p in predictions if p.tokens_per_s >= (1 - WORTH) * fastest]
    best = min(near, key=lambda p: (p.candidate.max_staleness, -p.tokens_per_s))
    return [best, *sorted((p for p in predictions if p is not best), key=lambda p: -p.tokens_per_s)]


def why_slower(prediction: Prediction, best: Prediction) -> str:
    """Where it loses its time, beside the best: the cause whose share of time has grown most."""
    gain = prediction.tokens_per_s / best.tokens_per_s - 1
    if gain >= 0:
        return f"older tokens for {gain:+.1%}"
    shares: dict[str, Callable[[Prediction], float]] = {
        "the trainer's devices are idle": lambda p: p.share(SimulatedUse.IDLE, of=(True,)),
        "the devices that only generate are idle": lambda p: p.share(SimulatedUse.IDLE, of=(False,)),
        "training waits for the staleness bound": lambda p: p.result.held_share,
        "hand-overs and weight updates": lambda p: p.share(SimulatedUse.SWITCH, SimulatedUse.SYNC),
    }
    growth, cause = max((share(prediction) - share(best), cause) for cause, share in shares.items())
    if growth < 0.02:
        return "engines run below their full batch"
    return f"{cause} ({growth:+.0%} of their time)" if "idle" in cause else f"{cause} ({growth:+.0%})"


MEGATRON = "actor_rollout_ref.actor.megatron"


@dataclass(frozen=True)
class AlikeMachines:
    """`count` machines of `devices` devices each; `backend` carries weights to devices that only generate."""

    count: int
    devices: int
    backend: str = "nccl"

    @property
    def size(self) -> int:
        return self.count * self.devices


def planned_resources(candidate: PlanCandidate, machines: AlikeMachines) -> Resources:
    """The candidate's machines with their tags."""
    tags = (Tag.TRAIN, Tag.ROLLOUT) if candidate.shared else (Tag.TRAIN,)
    groups = []
    for name, units, of in (("trainer", candidate.training, tags), ("rollout", candidate.generating, (Tag.ROLLOUT,))):
        devices = units * candidate.unit.size
        if devices % machines.devices:
            groups.append(MachineGroup(name, 1, devices, of))
        elif devices:
            groups.append(MachineGroup(name, devices // machines.devices, machines.devices, of))
    return Resources(tuple(groups))


def settings_of(candidate: PlanCandidate, machines: AlikeMachines) -> list[str]:
    """The candidate as overrides of a run, with which its plan is this one; also how weights travel, where they do.

    verl's own fields of machines are among them, for a job that has others would contradict the tags.
    """
    resources = planned_resources(candidate, machines)
    groups = [
        f"{{count: {group.count}, devices: {group.devices}, tags: [{', '.join(group.tags)}]}}"
        for group in resources.groups
    ]
    settings: dict[str, object] = {RESOURCES: f"[{', '.join(groups)}]", "seamless.layout": "auto"}
    settings |= verl_fields(resources, replica=candidate.unit.size, needed=())
    settings[f"{ROLLOUT_KEY}.tensor_model_parallel_size"] = candidate.unit.size
    if candidate.sizes is not None:
        for axis, size in zip(("tensor", "pipeline"), candidate.sizes, strict=True):
            settings[f"{MEGATRON}.{axis}_model_parallel_size"] = size
    if candidate.generating:
        settings[f"{ROLLOUT_KEY}.checkpoint_engine.backend"] = machines.backend
    settings["trainer.v1.seamless.parameter_sync_step"] = candidate.updates
    settings["seamless.max_staleness"] = candidate.max_staleness
    return [f"{key}={value}" for key, value in settings.items()]


def comparison_of(candidates: Sequence[PlanCandidate], machines: AlikeMachines, job: Sequence[str]) -> str:
    """The command that runs the first candidate of each layout, three times; `job` are its words.

    The job has the settings of the first candidate, too: it is checked without an arm before the arms are.
    """
    best = dict[str, PlanCandidate]()
    for candidate in candidates:
        best.setdefault(candidate.layout, candidate)
    arms = [":".join([layout, *settings_of(candidate, machines)]) for layout, candidate in best.items()]
    first = settings_of(candidates[0], machines)
    words = ["seamless-verl", "compare", *job, *first, "--arms", ",".join(arms), "--seeds", "1", "--rounds", "3"]
    return shlex.join(words)
