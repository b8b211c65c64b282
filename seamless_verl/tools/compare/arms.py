"""The arms of a comparison: a trainer mode each, its devices, and settings of its own. Pure: strings and numbers.

An arm is written `MODE`, `MODE:key=value:key=value`, or `NAME:seamless.key=value`, which is ours under that name. In an
arm of ours a key without a dot is of the `seamless:` node, as in `seamless:max_staleness=4`. Every arm has all devices
of the comparison: `sync` and `colocate_async` train and generate on all of them, `separate_async` trains on one half
and generates on the other, and ours does as its settings say.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from seamless_verl.errors import ConfigError

VERL_MODES = ("sync", "colocate_async", "separate_async")
OURS = "seamless"
MODES = (*VERL_MODES, OURS)
DEFAULT_ARMS = ("sync", "separate_async", OURS)
MODE = "trainer.v1.trainer_mode"
ROLLOUT = "actor_rollout_ref.rollout"
RESOURCES = "seamless.resources"
SETTING = re.compile(r"[+~]*[\w.@/]+=")
LONGEST_NAME = 200  # of 255 letters that file systems take, some of which are left for seed and round
BOUND, RATE = "seamless.max_staleness", "actor_rollout_ref.actor.optim.lr"
APART = ("disaggregated", "multiplexed")  # layouts with devices that only generate
SAMPLER = "trainer.v1.sampler"
BUFFER = f"{SAMPLER}.custom_sampler"
POLLING, SHORT_POLL_S = "pkg://seamless_verl.tools.compare.polling", 0.1


@dataclass(frozen=True)
class ComparedArm:
    """A trainer mode under some settings; `text` is how it was written, and `name` what it is called in the report.

    `rate` is the learning rate of an arm that is there with several, and `system` what these have in common; `line` is
    what those have in common that have different bounds on staleness.
    """

    text: str
    name: str
    mode: str
    settings: tuple[str, ...] = ()
    rate: str = ""
    system: str = ""
    line: str = ""

    @property
    def is_ours(self) -> bool:
        return self.mode == OURS

    def sets(self, key: str) -> bool:
        """Whether its own settings have this key."""
        return any(setting.lstrip("+").startswith(f"{key}=") for setting in self.settings)

    def with_setting(self, setting: str, mark: str) -> ComparedArm:
        """The arm with one more setting, which its name has as a mark."""
        settings = (*self.settings, setting)
        return replace(self, text=f"{self.text}:{setting}", name=f"{self.name} {mark}", settings=settings)


@dataclass(frozen=True)
class Machines:
    """`count` machines with `devices` devices each."""

    count: int
    devices: int

    @property
    def total(self) -> int:
        return self.count * self.devices


@dataclass(frozen=True)
class JobFacts:
    """What the overrides of an arm follow from: the machines, and prompts of a step and of an optimizer's step.

    `pool_backend` sends weights to a pool of its own; `by_tags` says that `seamless.resources` describes the machines,
    and `own_layout` that the job as it was given has devices that only generate.
    """

    machines: Machines
    batch: int
    mini_batch: int
    pool_backend: str
    by_tags: bool = False
    own_layout: bool = False


def parse_arm(text: str) -> ComparedArm:
    """The arm of that text; ConfigError for one of another form."""
    name, *settings = split_settings(text)
    complete = all("=" in setting for setting in settings)
    if name not in VERL_MODES:  # a key without a dot is of our node, but for one that is added
        settings = [f"seamless.{setting}" if re.match(r"\w+=", setting) else setting for setting in settings]
    if complete and name in MODES:
        return ComparedArm(text, text if settings else name, name, tuple(settings))
    if complete and re.fullmatch(r"[\w.-]+", name) and any(s.lstrip("+").startswith("seamless.") for s in settings):
        return ComparedArm(text, name, OURS, tuple(settings))
    way_out = f"Write it as one of {', '.join(MODES)}, with settings as in seamless:max_staleness=4, "
    way_out += "or with a name of its own as in far:max_staleness=4"
    raise ConfigError("--arms", text, "is no trainer mode with settings", way_out)


def parse_arms(text: str) -> list[ComparedArm]:
    """Arms separated by commas; ConfigError for one of another form, or one that comes twice."""
    arms = [parse_arm(part) for part in split_arms(text)]
    if len({folder_name(arm.name) for arm in arms}) < len(arms):
        raise ConfigError("--arms", text, "names one twice", "Name each once")
    return arms


def split_arms(text: str) -> list[str]:
    """The parts between commas that are outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def split_settings(text: str) -> list[str]:
    """An arm's name and its settings; a colon within a value, as of an address, separates nothing."""
    parts = text.split(":")
    found = parts[:1]
    for part in parts[1:]:
        if SETTING.match(part) or len(found) == 1:
            found.append(part)
        else:
            found[-1] += f":{part}"
    return found


def folder_name(arm: str) -> str:
    """A name for an arm's folder that hydra takes in an override, and a file system as a name."""
    name = re.sub(r"[^\w.-]+", "_", arm)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(arm.encode()).hexdigest()[:8]}"


def arm_overrides(arm: ComparedArm, facts: JobFacts) -> list[str]:
    """The mode, the devices and the arm's own settings, as hydra's overrides.

    Raises:
        ConfigError: the mode cannot use these devices, or this batch.
    """
    mode = [f"{MODE}={arm.mode}"]
    if arm.is_ours and (facts.by_tags or facts.own_layout or arm.sets(RESOURCES)):
        return [*mode, *arm.settings]
    mode += [f"{RESOURCES}=null"] if facts.by_tags else []
    machines = facts.machines
    if arm.mode != "separate_async" and not any(f"seamless.layout={layout}" in arm.settings for layout in APART):
        # verl divides by the pool's devices of a node even where it has no node: they stay as they are
        return [*mode, *devices("trainer", machines.count, machines.devices), f"{ROLLOUT}.nnodes=0", *arm.settings]
    pool = [*separate_devices(machines, arm.name), f"{ROLLOUT}.checkpoint_engine.backend={facts.pool_backend}"]
    if arm.mode == "separate_async":
        pool.append(f"trainer.v1.separate_async.parameter_sync_step={updates_of(facts)}")
    return [*mode, *pool, *arm.settings]


def devices(node: str, machines: int, each: int) -> list[str]:
    return [f"{node}.nnodes={machines}", f"{node}.n_gpus_per_node={each}"]


def separate_devices(machines: Machines, arm: str) -> list[str]:
    """One half of the machines, or of the one machine's devices, trains; the rest generates in a pool of its own."""
    if machines.total < 2:
        reason = "trains and generates on devices of their own, and this comparison has one"
        raise ConfigError("--devices", machines.total, f"{arm} {reason}", "Give --devices 2 or more")
    count, each = machines.count, machines.devices
    if count == 1:
        return devices("trainer", 1, each - each // 2) + devices(ROLLOUT, 1, each // 2)
    return devices("trainer", count - count // 2, each) + devices(ROLLOUT, count // 2, each)


def updates_of(facts: JobFacts) -> int:
    """Optimizer steps between two weight updates of separate_async, which takes one mini-batch at a time."""
    if facts.batch % facts.mini_batch:
        key = "actor_rollout_ref.actor.ppo_mini_batch_size"
        reason = f"does not divide data.train_batch_size={facts.batch}, as separate_async needs it"
        raise ConfigError(key, facts.mini_batch, reason, f"Set {key} to a divisor")
    return facts.batch // facts.mini_batch


def with_short_poll(arm: ComparedArm) -> ComparedArm:
    """One of verl's modes with its own buffer, which looks for finished prompts every `SHORT_POLL_S`.

    An arm of ours, or with a buffer of its own, stays as it is.
    """
    if arm.is_ours or arm.sets(f"{BUFFER}.path"):
        return arm
    name = "PollingReplayBuffer" if arm.mode == "sync" else "PollingReplayBufferAsync"
    more = (f"{BUFFER}.path={POLLING}", f"{BUFFER}.name={name}")
    text, marked = ":".join([arm.text, *more]), f"{arm.name} poll={SHORT_POLL_S:g}"
    return replace(arm, text=text, name=marked, settings=(*arm.settings, *more))


def repeated(arms: Sequence[ComparedArm], bounds: Sequence[int], rates: Sequence[str]) -> list[ComparedArm]:
    """Each arm of ours that has no bound on staleness with each bound, and every arm with each learning rate.

    Raises:
        ConfigError: no arm takes a bound, an arm has a learning rate of its own, or two have one name.
    """
    takers = [arm for arm in arms if arm.is_ours and not arm.sets(BOUND)]
    if bounds and not takers:
        way_out = "Name seamless among --arms, or leave --staleness out"
        reason = "no arm takes it: verl's modes do not, nor one that has its own"
        raise ConfigError("--staleness", list(bounds), reason, way_out)
    found = list[ComparedArm]()
    for arm in arms:
        bounded = [replace(arm.with_setting(f"{BOUND}={one}", f"s={one}"), line=arm.name) for one in bounds]
        found += bounded if arm in takers and bounds else [arm]
    if rates:
        for arm in found:
            if arm.sets(RATE):
                raise ConfigError("--learning-rates", arm.text, f"sets {RATE} itself", "Leave it out of the arm")
        marked = [(rate, arm, arm.with_setting(f"{RATE}={rate}", f"lr={rate}")) for rate in rates for arm in found]
        found = [
            replace(one, rate=rate, system=arm.name, line=f"{arm.line or arm.name} lr={rate}")
            for rate, arm, one in marked
        ]
    if len({folder_name(arm.name) for arm in found}) < len(found):
        raise ConfigError("--arms", [arm.name for arm in found], "two have one name", "Name them otherwise")
    return found
