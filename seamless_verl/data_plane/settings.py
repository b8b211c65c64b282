"""What a data plane is started with, and what a call to it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from seamless_verl.gateway.request_rules import RequestRules
from seamless_verl.trajectory.policies import GrammarTokens
from seamless_verl.trajectory.routes import Routes


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a gateway. `options` are those of `vllm serve`; `max_sequence` bounds a training sequence, in tokens,
    and `limit_keys` names the user's settings that it follows from; `grammar` says what is trained of tokens that were
    sampled under a grammar.

    The journal keeps sessions for `journal_days` after their hand-over and up to `journal_gib`; None is no bound.
    `socket_holder` names the actor that holds the listening socket, at `port`, while the gateway is down.
    `public_address` and `rules` are those of GatewaySettings. With `routes` the engines return them, and sessions that
    lack some are not trained.
    """

    model: str
    journal: str
    admin_key: str
    runner_key: str = ""
    journal_days: float | None = None
    journal_gib: float | None = None
    port: int = 0
    options: Sequence[str] = ()
    max_sequence: int | None = None
    limit_keys: str = "max_sequence"
    grammar: GrammarTokens = GrammarTokens.MASK_FORCED
    socket_holder: str | None = None
    public_address: str | None = None
    rules: RequestRules = field(default_factory=RequestRules)
    routes: bool = False


@dataclass(frozen=True)
class PlaneSettings:
    """Settings of one data plane.

    It runs at most `capacity` calls at once on one replica. The replicas' servers require `token`. A replica that
    does not pause or resume within `transition_s` is given up. With `restarts` the trainer starts lost replicas
    again, until it abandons them: calls wait for one even if none is left. With `grammars_resume` the engines
    resume a grammar where a call was cut. With `shares` the engines draft, and are given samples of others.
    With `validation_first` training waits for validations. If several data planes share the replicas, `others` of the
    first one names the rest, each of which is a `mirror`. Without `sessions` there is no gateway.
    """

    name: str
    token: str
    capacity: int = 256
    others: tuple[str, ...] = ()
    mirror: bool = False
    max_failed_groups: int = 32
    transition_s: float | None = None
    restarts: bool = False
    grammars_resume: bool = True
    shares: bool = False
    validation_first: bool = True
    sessions: SessionSettings | None = None


@dataclass
class Generated:
    """A whole generation: ids [N], logprobs [N] in nats, weight versions [N], and the finish reason.

    `routes` are those of the prompt's tokens from the one that was asked for, then of the generated ones.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    routes: Routes | None = None
