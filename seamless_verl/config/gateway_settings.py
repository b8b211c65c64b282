"""Settings of the gateway: what it serves, where, and what a request may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from seamless_verl.runtime.fields import Doc, NotNegative, Positive, PositiveNumber, Text

HostedTools: TypeAlias = Literal["drop", "refuse"]
Media: TypeAlias = Literal["replace", "refuse"]
JOURNAL = "trajectories.sqlite"


@dataclass(frozen=True)
class RequestsConfig:
    """What a request of an agent may ask for; more is refused with a 400 before the request is rendered."""

    strict_model: Annotated[
        bool,
        Doc("refuse model names other than `policy` and the last part of the model's path; else any name is taken"),
    ] = False
    hosted_tools: Annotated[
        HostedTools,
        Doc(
            "tools that a service would run itself, such as `web_search`, `code_interpreter`, `mcp`: `drop` leaves "
            "them out, and says so in the journal; `refuse` answers with a 400"
        ),
    ] = "drop"
    media: Annotated[
        Media,
        Doc(
            "images, audio, video and documents in messages, of which the model is given none: `replace` puts a "
            "placeholder for each, and says so in the journal; `refuse` answers with a 400"
        ),
    ] = "replace"
    max_choices: Annotated[Positive, Doc("choices of one request, `n`, for all of its prompts")] = 128
    max_nesting: Annotated[
        Positive,
        Doc("how deep objects and lists may be nested in tools and JSON schemas: compiling a deep one takes seconds"),
    ] = 64
    max_stored: Annotated[
        Positive,
        Doc("responses of the Responses API that a session keeps for `previous_response_id`; the oldest go first"),
    ] = 64


@dataclass(frozen=True)
class GatewayConfig:
    """The gateway: the APIs that users' own agents call, and the journal of their sessions."""

    enabled: Annotated[bool, Doc("serve OpenAI and Anthropic APIs for agents of your own")] = False
    port: Annotated[
        NotNegative,
        Doc("where the gateway listens, also after a restart of its process; `0` is any free port"),
    ] = 0
    journal: Annotated[
        Text | None,
        Doc("the journal's file; `null` is `trajectories.sqlite` beside the checkpoints"),
    ] = None
    journal_days: Annotated[
        PositiveNumber | None,
        Doc("for how many days a journal keeps a session after it was handed over to training; `null` is no bound"),
    ] = 7.0
    journal_gib: Annotated[
        PositiveNumber | None,
        Doc(
            "GiB of a journal above which its oldest sessions that were handed over are deleted; `null` is no bound. "
            "A run that is resumed begins again what was deleted before it was trained"
        ),
    ] = 4.0
    options: Annotated[
        tuple[str, ...],
        Doc(
            "options of `vllm serve` that concern requests: "
            """`'seamless.gateway.options=["--enable-auto-tool-choice","--tool-call-parser=hermes"]'`; a """
            "reasoning parser becomes the engines' too",
            way_out="""Write it as '{key}=["--one","--two=2"]'""",
        ),
    ] = ()
    shards: Annotated[
        Positive,
        Doc(
            "processes that share sessions and calls, spread over the nodes; each of several has a port "
            "of its own, from `port` on, and a journal of its own, `trajectories-<n>.sqlite`",
        ),
    ] = 1
    public_address: Annotated[
        Text | None,
        Doc(
            "the host in the address that agents are given, or a whole URL such as `https://gateway.example:8443`; "
            "`null` is the address of the gateway's node. It also listens at the loopback address"
        ),
    ] = None
    requests: Annotated[RequestsConfig, Doc("bounds of one request")] = field(default_factory=RequestsConfig)
    max_calls: Annotated[
        Positive | None,
        Doc(
            "calls of all sessions of one shard that run at once; more get a 429 with `retry-after`; `null` is no bound"
        ),
    ] = None
    max_sessions: Annotated[
        Positive | None,
        Doc(
            "sessions of one shard that are open when another one is opened over HTTP, or for a runner: more get a 429 "
            "with `retry-after`; `null` is no bound",
        ),
    ] = None
    max_body_mib: Annotated[
        Positive,
        Doc("MiB of one request's body; more get a 413. 32 are near 8 million tokens of text"),
    ] = 32
    max_failed_groups: Annotated[
        Positive,
        Doc(
            "groups of sessions that may fail in a row, without a success, before the run ends with the "
            "last one's error",
        ),
    ] = 32

    def journal_of(self, shard: int, folder: str) -> Path:
        """The journal's file of one shard: `trajectories.sqlite`, or `trajectories-<shard>.sqlite` of several.

        It is in `folder` unless `journal` is set.
        """
        path = Path(self.journal) if self.journal else Path(folder, JOURNAL)
        return path if self.shards == 1 else path.with_name(f"{path.stem}-{shard}{path.suffix}")
