"""The settings of one entry in the file of agent loops, for agents that run against a session of the gateway.

The run itself sets a session's lifetime, and the trainer the sampling parameters in `TRAINERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Le, MinLen

from seamless_verl.agents.command import AgentCommand
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.errors import ConfigError, refuse
from seamless_verl.runtime import fields
from seamless_verl.runtime.fields import Positive, PositiveNumber, Seed, SettingsNode, Share, Text, way_out

TRAINERS = {
    **{name: f"Set actor_rollout_ref.rollout.{name} instead" for name in ("temperature", "top_p", "top_k")},
    "repetition_penalty": "Leave it out: verl samples with 1.0",
}
"""Sampling parameters that are the trainer's own, whatever an agent asks for, and how each is set."""
SLACK_S = 30.0  # a session outlives its agent's time limit by this, so that the agent's limit is what ends it
Penalty: TypeAlias = Annotated[float, Ge(-2), Le(2)]


@dataclass(frozen=True)
class SessionQuota(SettingsNode):
    """Bounds of one session; None is no bound."""

    max_turns: Positive | None = None
    """API calls of one session."""
    max_tokens: Positive | None = None
    """Tokens generated in all calls of one session."""
    max_concurrent: Positive | None = None
    """Calls of one session at a time."""


@dataclass(frozen=True)
class SamplingDefaults(SettingsNode):
    """Sampling parameters of calls in which the agent gives none; None leaves the engine's default."""

    min_p: Share | None = None
    """Of calls in which the agent gives none."""
    presence_penalty: Penalty | None = None
    """Of calls in which the agent gives none."""
    frequency_penalty: Penalty | None = None
    """Of calls in which the agent gives none."""
    seed: Seed | None = None
    """Of calls in which the agent gives none; the trainer's own `temperature`, `top_p`, `top_k` hold in every call."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings(SettingsNode):
    """The settings that every entry may have."""

    name: Text = ""
    time_limit_s: Annotated[PositiveNumber, way_out("Set {key}=600, or leave it out")] = 600.0
    """Seconds of its own time until an agent is ended; waits for replicas do not count. Its session ends 30 s later."""
    failure_reward: float | None = None
    """Reward of a session whose agent failed by itself; `null`: it is dropped, as after a failure of a tool or
    engine."""
    on_timeout: Literal["score", "drop"] = "score"
    """An agent out of time: `score` trains what it did, with the posted reward or `failure_reward`; `drop` leaves it
    out."""
    session: SessionQuota = field(default_factory=SessionQuota)
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    def opening(
        self,
        uid: str,
        session_id: str,
        *,
        sampling_params: Mapping[str, Any],
        max_tokens: int,
        validation: bool = False,
    ) -> dict[str, Any]:
        """The body of the gateway's admin call that opens a session of this loop.

        `sampling_params` are those of verl's call; the trainer's own among them win over what an agent asks for.
        `max_tokens` bounds each call, `session.max_tokens` all calls together.
        """
        overrides = {name: sampling_params[name] for name in TRAINERS if name in sampling_params}
        return {
            "uid": uid,
            "limits": {"lifetime": self.time_limit_s + SLACK_S, **given(self.session)},
            # (uid, session) is TransferQueue's key
            "metadata": {"session": session_id, **({"validation": True} if validation else {})},
            "sampling": {"defaults": given(self.sampling), "overrides": overrides, "max_tokens": max_tokens},
        }


@dataclass(frozen=True, kw_only=True)
class CallableSettings(LoopSettings):
    """An entry of a CallableAgentLoop."""

    agent: Annotated[Text, way_out("Write package.module:name or path/to/file.py:name")]
    """The function `agent(task, endpoint)`, as `package.module:name` or `path/to/file.py:name`."""


@dataclass(frozen=True, kw_only=True)
class CommandSettings(LoopSettings):
    """An entry of a CommandAgentLoop. The limits' `wall_s` is `time_limit_s`."""

    command: Annotated[
        Text | Annotated[tuple[str | int | float, ...], MinLen(1)], way_out("Write it as [python, agent.py]")
    ]
    """Words, or a text for `/bin/sh`; `{field}` is the task's, `{question}` its last user text, also `{prompt_file}`,
    `{session}`."""
    folder: Text | None = None
    """Copied to be the working folder, `{field}` as in `command`: `repos/{extra_info.repo}`; `null`: an empty one."""
    env: dict[str, str] | None = None
    """Further variables of the command's environment."""
    keep_failed: Text | None = None
    """Where the working folders of commands that failed are moved, and never deleted; `null` keeps none."""
    limits: CommandLimits = field(default_factory=CommandLimits)

    @property
    def agent_command(self) -> AgentCommand:
        """What is run: a command line for a shell, or its words. Raises ConfigError for what cannot work."""
        return AgentCommand(
            self.command if isinstance(self.command, str) else [str(word) for word in self.command],
            folder=self.folder,
            env=self.env or {},
            keep_failed=self.keep_failed,
            limits=replace(self.limits, wall_s=self.time_limit_s),
        )


@dataclass(frozen=True, kw_only=True)
class RunnerSettings(LoopSettings):
    """An entry of a RunnerAgentLoop."""

    agent: Text = "default"
    """The name under which runners offer the agent: `seamless-verl runner --agent NAME=module:run`."""
    lease_s: PositiveNumber = 30.0
    """Seconds without a sign of life of its runner until a task is given to another one."""
    claim_s: PositiveNumber | None = None
    """Seconds that a task waits for a runner until it fails; `null`: it waits for ever."""
    max_attempts: Positive = 8
    """Runners that may be lost with a task, or refuse it, until it fails; its group is trained without it."""


S = TypeVar("S", bound=LoopSettings)


def read_settings(kind: type[S], entry: Mapping[str, Any], *, key: str) -> S:
    """The settings of an entry; keys that begin with `_` are hydra's.

    Raises:
        ConfigError: an unknown key or a bad value; ConfigErrors where there are several.
    """
    values = {name: value for name, value in entry.items() if not str(name).startswith("_")}
    elsewhere = {"sampling": TRAINERS, "limits": {"wall_s": f"Set {key}.time_limit_s instead"}}
    mistakes: list[ConfigError] = []
    for node, ways_out in elsewhere.items():
        inner = values.get(node)
        if isinstance(inner, Mapping):
            values[node] = {name: value for name, value in inner.items() if name not in ways_out}
            found = {name: ways_out[name] for name in inner if name in ways_out}
            mistakes += [ConfigError(f"{key}.{node}.{n}", inner[n], "is set elsewhere", found[n]) for n in found]
    try:
        settings = fields.read(kind, values, key=key)
    except ConfigError as error:
        refuse([*mistakes, *error.mistakes])
        raise
    refuse(mistakes)
    return settings


def given(settings: object) -> dict[str, Any]:
    """The fields that are set, by name."""
    return {name: value for name, value in asdict(settings).items() if value is not None}  # type: ignore[call-overload]
