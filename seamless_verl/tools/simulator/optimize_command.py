"""`seamless-verl plan --optimize`: which layout of given machines is the fastest, by simulation.

Times are those of a calibrated run, or of an accelerator's published figures and the model's sizes.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from seamless_verl.cli.output import text_table
from seamless_verl.config.checks.batches import MINI
from seamless_verl.config.checks.batches import TRAIN as TRAIN_BATCH
from seamless_verl.config.planning import memory_facts_with, resources_of, roles_of
from seamless_verl.config.roles import ROLLOUT_KEY as ENGINE
from seamless_verl.config.roles import pool_backend
from seamless_verl.config.schema import Handover, KvOnUpdate
from seamless_verl.config.settings import Settings
from seamless_verl.errors import ConfigError, WordError, refuse
from seamless_verl.resources.memory import MemoryFacts
from seamless_verl.resources.memory_fit import gigabytes, memory_problems
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.plan import make_plan
from seamless_verl.resources.tags import KEY as RESOURCES
from seamless_verl.tools.compare.job import SCRIPT, reads_main
from seamless_verl.tools.plan.run_lines import shared_prefixes_line, shared_prefixes_obstacle
from seamless_verl.tools.simulator.calibration import read_calibration
from seamless_verl.tools.simulator.machine import (
    ACCELERATORS,
    ASSUMED,
    Accelerator,
    machine_of,
    named,
    seats_of,
)
from seamless_verl.tools.simulator.optimize import (
    AlikeMachines,
    PlanCandidate,
    Prediction,
    Search,
    Unit,
    comparison_of,
    layouts,
    planned_resources,
    settings_of,
    why_slower,
)
from seamless_verl.tools.simulator.scenario import SimulatedWorkload

MACHINES = re.compile(r"(\d+)x(\d+)")
REPLICAS = (1, 2, 4, 8)
TRAINERS = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 4), (8, 8))  # TP, PP: the first that fits is taken
STALENESS = (0, 1, 2, 4, 8, 16)
UPDATES = (1, 2, 4)
CONFIG_NAME = re.compile(r"--config-name[= ]([\w.-]+)")
MODEL_PATH = "actor_rollout_ref.model.path"
JOB = "with the recipe, the config file or the settings of your run for JOB"
HEADER = ("", "LAYOUT", "DEVICES", "REPLICA", "TRAINER", "UPDATES", "STALE", "TOK/S", "IDLE", "MEMORY", "WHY NOT FIRST")
LEAST = {"median": 1, "sigma": 0, "turns": 1, "tool_s": 0, "tool_tokens": 0, "prompt_tokens": 1, "steps": 4, "top": 1}
OF_LENGTHS = ("median", "sigma", "turns", "tool_s", "tool_tokens", "prompt_tokens")
"""Arguments that say what to assume of a run that was not measured."""
OF_CALIBRATION = {
    True: "updates: the prompt of a group's sequences is computed once, as in the calibrated run",
    False: "updates: each sequence is computed alone, as in the calibrated run",
}


def optimize(args: argparse.Namespace, settings: Settings) -> str:
    """The best plans as text, or as JSON. Raises ConfigError for what cannot be searched."""
    _check(args)
    machines = machines_of(args.machines, settings)
    if args.calibration is not None:
        found = read_calibration(args.calibration)
        refuse(contradicting(args, settings, found.workload))
        unit = Unit(1, found.machine, found.seats)  # one of the run's devices
        workload, candidates = found.workload, list(layouts(machines.size, unit, _step(machines, 1)))
        updates = OF_CALIBRATION[found.machine.shares_prompts]
    else:
        workload = workload_of(args, settings)
        device = named(ACCELERATORS, args.device, "--device", "no figures of it are here")
        candidates = published(device, settings, machines, workload)
        updates = shared_prefixes_line(settings)
    bound = settings.seamless.staleness_bound
    search = Search(
        workload,
        stalenesses=(*(staleness for staleness in STALENESS if staleness < bound), bound),
        updates=permitted_updates(settings, workload.prompts),
        steps=args.steps,
        keep_cache=settings.seamless.weights.kv is KvOnUpdate.KEEP,
    )
    predictions = search.run(candidates, progress=_progress)
    if args.json:
        return to_json(predictions, machines, args)
    return "\n".join(lines(predictions, machines, args, updates + saving(candidates, search)))


def saving(candidates: Sequence[PlanCandidate], search: Search) -> str:
    """What updates save where they compute a group's prompt once, as an addition to a line; else nothing."""
    repeated, tokens = search.workload.repeated_tokens, sum(search.step_tokens())
    shares = repeated and any(candidate.unit.machine.shares_prompts for candidate in candidates)
    return f", {repeated / tokens:.0%} fewer tokens" if shares else ""


def machines_of(text: str | None, settings: Settings) -> AlikeMachines:
    """Raises ConfigError where the machines are not alike, or none are named."""
    given = settings.get(f"{ENGINE}.checkpoint_engine.backend")
    backend = pool_backend(given, accelerator=settings.host.accelerator)
    if text is not None:
        if not (match := MACHINES.fullmatch(text)) or not all(int(part) for part in match.groups()):
            raise ConfigError("--machines", text, "it is no number of machines and of devices", "Write it as 4x8")
        return AlikeMachines(int(match[1]), int(match[2]), backend)
    groups = resources_of(settings).groups
    sizes = {group.devices for group in groups}
    if len(sizes) > 1:
        way_out = "Give machines that are alike with --machines, such as 4x8"
        raise ConfigError("seamless.resources", sorted(sizes), "machines with unlike numbers of devices", way_out)
    return AlikeMachines(sum(group.count for group in groups), sizes.pop(), backend)


def permitted_updates(settings: Settings, prompts: int) -> tuple[int, ...]:
    """How many local updates a step of so many prompts may have, by the config if it is of such steps."""
    alike = settings.integer(TRAIN_BATCH) == prompts
    mini = settings.integer(MINI) if alike else 1
    return tuple(n for n in UPDATES if prompts % (n * mini) == 0) or UPDATES[:1]


def contradicting(args: argparse.Namespace, settings: Settings, measured: SimulatedWorkload) -> list[ConfigError]:
    """A mistake for each argument and setting that describes another workload than the calibrated run had."""
    found = [
        ConfigError(
            option.option_strings[0],
            value,
            "is for --device: a calibration has the lengths of its run",
            "Leave it out, or give --device instead of --calibration",
        )
        for option in args.search
        if option.dest in OF_LENGTHS and (value := getattr(args, option.dest)) != option.default
    ]
    given = dict(text.lstrip("+").partition("=")[::2] for text in args.overrides)
    for key, value in ((TRAIN_BATCH, measured.prompts), (f"{ENGINE}.n", measured.samples)):
        if args.config_dir is not None:
            given.setdefault(key, str(settings.get(key)))
        if key in given and given[key] != str(value):
            reason = f"the calibrated run had {value}, and its times are of that"
            found.append(ConfigError(key, given[key], reason, "Leave it out, or calibrate a run that has it"))
    return found


def workload_of(args: argparse.Namespace, settings: Settings) -> SimulatedWorkload:
    """The batch of the config, with lengths as given."""
    longest = settings.integer("data.max_response_length", 512)
    cap = max(1, (longest - (args.turns - 1) * args.tool_tokens) // args.turns)
    return SimulatedWorkload(
        prompts=settings.integer("data.train_batch_size"),
        samples=settings.integer(f"{ENGINE}.n", 1),
        median=float(args.median or max(1, cap // 4)),
        sigma=args.sigma,
        cap=cap,
        turns=args.turns,
        tool_mean_s=args.tool_s,
        tool_tokens=args.tool_tokens,
        prompt_tokens=args.prompt_tokens or settings.integer("data.max_prompt_length", 512) // 2,
    )


def published(
    device: Accelerator, settings: Settings, machines: AlikeMachines, workload: SimulatedWorkload
) -> list[PlanCandidate]:
    """Layouts with every replica size that fits their memory. Raises ConfigError where none does, with the reason."""
    facts = memory_facts_with(settings, Handover.RELEASED)
    if facts is None:
        way_out = "Give the folder of a model that is here, trained by Megatron; or --calibration"
        raise ConfigError(MODEL_PATH, None, "the sizes of the model are not known", way_out)
    facts = replace(facts, device_bytes=facts.device_bytes or int(device.memory), host_bytes=None)
    context = workload.prompt_tokens + workload.turns * (workload.median * 1.4 + workload.tool_tokens)
    shares = shared_prefixes_obstacle(settings) is None
    found: list[PlanCandidate] = []
    reason: ConfigError | None = None
    most = settings.integer(f"{ENGINE}.max_num_seqs", 256)
    for size in (size for size in REPLICAS if machines.devices % size == 0):
        seats = seats_of(device, facts.actor, size, context=context, share=facts.engine.utilization, most=most)
        if not seats:
            reason = ConfigError(f"{ENGINE}.tensor_model_parallel_size", size, "no call fits its cache", "Raise it")
            continue
        recompute = facts.training.full_recompute
        machine = machine_of(device, facts.actor, size, length=context, recompute=recompute)
        unit = Unit(size, replace(machine, shares_prompts=shares), seats)
        for candidate in layouts(machines.size // size, unit, _step(machines, size)):
            try:
                found.append(fitted(candidate, machines, settings, facts))
            except ConfigError as error:
                reason = error
    if not found:
        raise reason or ConfigError("--machines", str(machines), "no replica divides a machine", "Give others")
    return found


def fitted(candidate: PlanCandidate, machines: AlikeMachines, settings: Settings, facts: MemoryFacts) -> PlanCandidate:
    """The candidate with the smallest trainer's sizes that fit its memory. Raises ConfigError with what does not."""
    resources = planned_resources(candidate, machines)
    refused: ConfigError | None = None
    for tensor, pipeline in TRAINERS:
        try:
            plan = make_plan(
                resources, ParallelSizes(tensor, pipeline), ReplicaSizes(candidate.unit.size), roles_of(settings), facts
            )
        except ConfigError as error:
            refused = refused or error
            continue
        problems = [problem for problem in memory_problems(plan) if problem.certain]
        if not problems:
            peak = max(p.peak.certain for p in plan.memory)
            return replace(candidate, sizes=(tensor, pipeline), memory=gigabytes(peak))
        refused = ConfigError(problems[0].key, tensor, problems[0].reason, problems[0].way_out)
    assert refused is not None
    raise refused


def _step(machines: AlikeMachines, size: int) -> int:
    """Units of a machine, which is not divided where there are several."""
    return machines.devices // size if machines.count > 1 else 1


def _check(args: argparse.Namespace) -> None:
    if args.calibration is None and args.device is None:
        way_out = (
            f"Add --device NAME ({', '.join(ACCELERATORS)}), or --calibration FILE of `seamless-verl calibrate RUN`"
        )
        raise WordError("--optimize", None, "needs the times of a device, or of a run of yours", way_out)
    if args.calibration is not None and args.device is not None:
        raise ConfigError("--device", args.device, "the calibration has the times", "Leave one of the two out")
    for key, least in LEAST.items():
        if (value := getattr(args, key)) is not None and value < least:
            raise ConfigError(f"--{key.replace('_', '-')}", value, "it is too small", f"Give {least} or more")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Ksimulating {text}")


def lines(
    predictions: Sequence[Prediction], machines: AlikeMachines, args: argparse.Namespace, updates: str
) -> Iterator[str]:
    """Lines for a terminal: the best plans, and where the next ones lose; `updates` says what those compute."""
    best, of = predictions[0], args.calibration or args.device
    yield f"{machines.count} x {machines.devices} devices, times of {of}; {len(predictions)} plans simulated"
    yield from filter(None, [updates])
    yield ""
    divisions = best_of_divisions(predictions)
    yield text_table(HEADER, [_cells(str(n), p, best) for n, p in enumerate(divisions[: args.top], 1)])
    if variants := [p for p in predictions[1:] if p.candidate.place == best.candidate.place]:
        yield ""
        yield text_table(("the first with", *HEADER[1:]), [_cells("", p, best) for p in variants[: args.top]])
    yield ""
    yield f"the first as settings: {shlex.join(settings_of(best.candidate, machines))}"
    if len({prediction.candidate.layout for prediction in divisions}) > 1:
        yield ""
        yield f"to run the best plan of each layout{'' if job_words(args) else f', {JOB}'}:"
        yield comparison_of([p.candidate for p in divisions], machines, job_words(args) or ["JOB"])
    if args.calibration is None:
        yield f"{args.device}: {ACCELERATORS[args.device].source}; assumed: {'; '.join(ASSUMED)}"


def job_words(args: argparse.Namespace) -> list[str]:
    """What was planned, as `seamless-verl compare` takes it; nothing where neither a config nor a model was given."""
    settings = [text for text in args.overrides if not text.startswith(f"{RESOURCES}=")]
    if args.config_dir is not None:
        name, script = args.config_name.removesuffix(".yaml"), args.config_dir / SCRIPT
        if script.is_file() and reads_main(script) and name in CONFIG_NAME.findall(script.read_text(encoding="utf-8")):
            return [str(args.config_dir), *(text for text in settings if not text.startswith("hydra."))]
        return [str(args.config_dir / f"{name}.yaml"), *settings]
    return settings if any(text.startswith(f"{MODEL_PATH}=") for text in settings) else []


def best_of_divisions(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Of each division of the devices, with its sizes, the best one, in order."""
    found: dict[tuple[int, ...], Prediction] = {}
    for prediction in predictions:
        found.setdefault(prediction.candidate.place, prediction)
    return list(found.values())


def _cells(number: str, prediction: Prediction, best: Prediction) -> tuple[str, ...]:
    candidate, result = prediction.candidate, prediction.result
    return (
        number,
        candidate.layout,
        candidate.tags,
        f"{candidate.unit.size}",
        candidate.trainer,
        str(candidate.updates),
        str(candidate.max_staleness),
        f"{result.tokens_per_s:,.0f}",
        f"{result.idle_share:.1%}",
        candidate.memory,
        "" if prediction is best else why_slower(prediction, best),
    )


def to_json(predictions: Sequence[Prediction], machines: AlikeMachines, args: argparse.Namespace) -> str:
    """The plans and their predictions, the best first."""
    best = predictions[0]
    plans = [
        {
            "layout": p.candidate.layout,
            "training_devices": p.candidate.training * p.candidate.unit.size,
            "rollout_devices": p.candidate.generating * p.candidate.unit.size,
            "replica_devices": p.candidate.unit.size,
            "trainer": p.candidate.trainer,
            "updates": p.candidate.updates,
            "max_staleness": p.candidate.max_staleness,
            "memory": p.candidate.memory,
            "settings": shlex.join(settings_of(p.candidate, machines)),
            "why_not_first": "" if p is best else why_slower(p, best),
            **{key: value for key, value in p.result.as_dict().items() if key != "shares"},
        }
        for p in predictions[: args.top]
    ]
    of = str(args.calibration or args.device)
    sizes = {"count": machines.count, "devices": machines.devices}
    return json.dumps({"format": 1, "machines": sizes, "times_of": of, "plans": plans}, indent=2)
