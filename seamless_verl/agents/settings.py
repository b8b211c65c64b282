"""The settings of one entry in the file of agent loops, for agents that run against a session of the gateway.

A session's limits and sampling defaults are what the gateway's admin API takes when a session is opened. The run
itself sets a session's lifetime, and the trainer the sampling parameters in `TRAINERS`; neither can be set here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import Meta

from seamless_verl.agents.command import AgentCommand
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.errors import ConfigError, refuse
from seamless_verl.runtime import fields
from seamless_verl.runtime.fields import Doc, Positive, PositiveNumber, Seed, Text

TRAINERS = {
    **{name: f"Set actor_rollout_ref.rollout.{name} instead" for name in ("temperature", "top_p", "top_k")},
    "repetition_penalty": "Leave it out: verl samples with 1.0",
}
"""Sampling parameters that are the trainer's own, whatever an agent asks for, and how each is set."""
SLACK_S = 30.0  # a session outlives its agent's time limit by this, so that the agent's limit is what ends it
DEFAULT = "of calls in which the agent gives none"
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
OnTimeout: TypeAlias = Literal["score", "drop"]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True)
class SessionQuota:
    """Bounds of one session; None is no bound."""

    max_turns: Annotated[Positive | None, Doc("API calls of one session")] = None
    max_tokens: Annotated[Positive | None, Doc("tokens generated in all calls of one session")] = None
    max_concurrent: Annotated[Positive | None, Doc("calls of one session at a time")] = None


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling parameters of calls in which the agent gives none; None leaves the engine's default."""

    min_p: Annotated[Share | None, Doc(DEFAULT)] = None
    presence_penalty: Annotated[Penalty | None, Doc(DEFAULT)] = None
    frequency_penalty: Annotated[Penalty | None, Doc(DEFAULT)] = None
    seed: Annotated[
        Seed | None,
        Doc(
            f"{DEFAULT}; the trainer's own `temperature`, `top_p`, `top_k` and `repetition_penalty` hold in every "
            "call and cannot be set here",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The settings that every entry may have."""

    name: Text = ""
    time_limit_s: Annotated[
        PositiveNumber,
        Doc(
            "seconds of its own time until an agent is ended, without those in which its calls waited for a replica or "
            f"were paused; its session closes {SLACK_S:g} seconds later at the latest",
            way_out="Set {key}=600, or leave it out",
        ),
    ] = 600.0
    failure_reward: Annotated[
        float | None,
        Doc("reward of a session whose agent failed; `null`: it is dropped, and its group is trained without it"),
    ] = 0.0
    on_timeout: Annotated[
        OnTimeout,
        Doc(
            "what becomes of a session whose agent ran out of time: `score` trains it, with the reward that was "
            "posted, else `failure_reward`, or where that is `null` what verl's reward manager says; `drop` trains "
            "nothing of it, and its group is trained without it"
        ),
    ] = "score"
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

    agent: Annotated[
        Text,
        Doc(
            "the function `agent(task, endpoint)` of a CallableAgentLoop, as `package.module:name` or "
            "`path/to/file.py:name`",
            way_out="Write package.module:name or path/to/file.py:name",
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class CommandSettings(LoopSettings):
    """An entry of a CommandAgentLoop. The limits' `wall_s` is `time_limit_s`."""

    command: Annotated[
        Text | Annotated[tuple[str | int | float, ...], Meta(min_length=1)],
        Doc(
            "the command line of a CommandAgentLoop: a list of words, or a text for `/bin/sh`; `{field}` stands for a "
            "value of the task, `{question}` for the last user text, `{prompt_file}` for a file with it, `{session}` "
            "for the session's id",
            way_out="Write it as [python, agent.py]",
        ),
    ]
    folder: Annotated[
        Text | None,
        Doc(
            "copied to be the command's working folder, `{field}` as in `command`: `repos/{extra_info.repo}`; `null` "
            "starts in an empty one",
        ),
    ] = None
    env: Annotated[dict[str, str] | None, Doc("further variables of the command's environment")] = None
    keep_failed: Annotated[
        Text | None,
        Doc(
            "a folder of the agent loop worker's machine to which a session's working folder is moved when its command "
            "failed, ran out of time or wrote too much; nothing is deleted there. `null` keeps none"
        ),
    ] = None
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

    agent: Annotated[
        Text,
        Doc("the name under which runners offer the agent: `seamless-verl runner --agent NAME=module:run`"),
    ] = "default"
    lease_s: Annotated[
        PositiveNumber,
        Doc("seconds without a sign of life of its runner until a task is given to another one"),
    ] = 30.0
    claim_s: Annotated[
        PositiveNumber | None,
        Doc("seconds that a task waits for a runner until it fails; `null`: it waits for ever"),
    ] = None
    max_attempts: Annotated[
        Positive,
        Doc("runners that may be lost with a task, or refuse it, until it fails and its group is trained without it"),
    ] = 8


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
