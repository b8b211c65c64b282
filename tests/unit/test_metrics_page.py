"""docs/metrics.md has every metric that the code writes, and no other."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product

import pytest
from support.metric_names import PAGE, in_source, listed, put_in, rows, unlisted

from seamless_verl.agents.outcome import AgentStatus
from seamless_verl.algorithms.samplers.sampling import COUNTED, LEVELS
from seamless_verl.data_plane.earlier_sessions import BegunAgain
from seamless_verl.data_plane.lease_book import TaskState
from seamless_verl.resources.ledger.activity import BUSY, DeviceUse
from seamless_verl.resources.lending.policy import LendingReason
from seamless_verl.rollout.call import ENDS
from seamless_verl.rollout.replica import ReplicaState
from seamless_verl.rollout.restarts import LossReason, RestartStage
from seamless_verl.rollout.routing import PrefixAffinity
from seamless_verl.runtime.step_metrics import PROMPT, RESPONSE, TOKENS
from seamless_verl.runtime.waits import WaitKind
from seamless_verl.tools.view.metrics import CHARTS
from seamless_verl.trainer.run_waits import SETTINGS
from seamless_verl.trainer.step_log import IDLE, REWARD, SECONDS, STALENESS, WAITS
from seamless_verl.trajectory.account import DropReason
from seamless_verl.weights.update import CommitTimes

NO_METRICS = {"application/json", "http/protobuf", "ray/session_2*/logs", "seamless/device"}
"""What has the shape of a name: a media type, a protocol, a folder, the beginning of names."""
FAILURES = (
    AgentStatus.FAILED,
    AgentStatus.TIMED_OUT,
    AgentStatus.OUTPUT_LIMIT,
    AgentStatus.TOOL_FAILED,
    AgentStatus.ENGINE_FAILED,
    AgentStatus.EXPIRED,
    AgentStatus.CANCELLED,
    "untrainable",
    "reward",
    "stuck",
    "error",
)
COMMIT = CommitTimes(pauses_s=[0.1], load_s=1.0).metrics()
COMPUTED: dict[str, Iterable[str | tuple[str, ...]]] = {
    "calls/*": ENDS,
    "seamless/tokens/masked_as_*": [DropReason.STALE, DropReason.PIVOT, DropReason.REJECTED],
    "fleet/*": ReplicaState,
    "fleet/given_up/*": LossReason,
    "lending/*": ["/".join(pair) for pair in product(("lent", "reclaimed"), LendingReason)],
    "replicas/*": [stage for stage in RestartStage if stage is not RestartStage.SERVING],
    "replicas/lost/*": LossReason,
    "resumed/begun_again/*": BegunAgain,
    "routing/*": PrefixAffinity.OUTCOMES,
    "runner_tasks/*": TaskState,
    "seamless/agreement/*/*": [*product(("plain", "grammar", "engine", "record"), ("tokens", "mean", "max"))],
    "seamless/commit/*": [*COMMIT, "waited_s"],
    "seamless/device/*/*_share": [("<device>", kind) for kind in DeviceUse],
    "seamless/device/*_s": DeviceUse,
    "seamless/device/*_share": DeviceUse,
    "seamless/device/overlap/*_under_*_s": [(under, over) for over, under in combinations(BUSY, 2)],
    "seamless/device/run/*_share": DeviceUse,
    "seamless/sampler/*": [*COUNTED, "left_out"],
    "seamless/sampler/samples/*": ("mean", "min", "max"),
    "seamless/sampler/samples_of/*": LEVELS,
    "sessions/failed/*": [*FAILURES, TaskState.LOST, TaskState.UNCLAIMED],
    "tokens/dropped/*": DropReason,
    "watchdog/named/*": SETTINGS,
    "watchdog/recovery/*": (WaitKind.REPLICA, WaitKind.GROUP, WaitKind.SERVER),
}
"""What the source computes of a name: the values of each `*`."""


def of_code() -> set[str]:
    whole = {name for name in in_source() - NO_METRICS if "*" not in name}
    return whole | {filled(pattern, value) for pattern, values in COMPUTED.items() for value in values}


def filled(pattern: str, values: str | tuple[str, ...]) -> str:
    for value in (values,) if isinstance(values, str) else values:
        pattern = pattern.replace("*", value, 1)
    return pattern


def test_the_page_has_every_metric() -> None:
    code, page = of_code(), listed()
    missing, unknown = code - page, page - code
    assert not missing, f"{PAGE.name} lacks {sorted(missing)}"
    assert not unknown, f"{PAGE.name} lists what the code does not have: {sorted(unknown)}"


def test_what_is_computed_has_known_values() -> None:
    assert {name for name in in_source() if "*" in name} - NO_METRICS == COMPUTED.keys()
    assert in_source() > NO_METRICS


def test_no_row_is_there_twice() -> None:
    names = [name for row in rows(PAGE.read_text(encoding="utf-8")) for name in put_in(*row)]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_what_is_shown_of_a_step_is_on_the_page() -> None:
    charts = {name for chart in CHARTS for name, _ in chart.lines}
    line = {REWARD, TOKENS, PROMPT, RESPONSE, SECONDS, IDLE, STALENESS, *WAITS}
    assert line | charts <= listed() | listed(of_verl=True)


def test_names_of_a_run_are_compared_with_the_page() -> None:
    known = ["seamless/device/train-0/idle_share", "fleet/serving", "tokens/dropped/stale", "critic/score/mean"]
    assert unlisted(known) == set()
    assert unlisted(["fleet/sleeping", "tokens/lost", "seamless/device/train-0/naps"]) == {
        *("fleet/sleeping", "tokens/lost", "seamless/device/train-0/naps")
    }


@pytest.mark.parametrize(
    ("meaning", "names"),
    [("`<kind>`: `b`, `c` (why, or how), `d`. More", ["a/b", "a/c", "a/d"]), ("nothing is listed", ["a/<kind>"])],
)
def test_values_of_a_row(meaning: str, names: list[str]) -> None:
    assert list(put_in(["a/<kind>"], meaning)) == names
