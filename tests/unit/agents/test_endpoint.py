"""What an agent is told of its session, and how the end of its run is written down."""

from __future__ import annotations

import math
import pickle

import pytest
from support.agents import ENDPOINT

from seamless_verl.agents.endpoint import Endpoint, around_proxy, environment
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus, reward_of
from seamless_verl.errors import ConfigError


def test_public_clients_find_the_session_by_their_own_variables() -> None:
    assert environment(ENDPOINT) == {
        "OPENAI_BASE_URL": "http://127.0.0.1:8000/v1",
        "OPENAI_API_KEY": "sk-secret",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8000",
        "ANTHROPIC_API_KEY": "sk-secret",
        "ANTHROPIC_AUTH_TOKEN": "sk-secret",
        "SEAMLESS_SESSION_ID": "group/7",
        "SEAMLESS_REWARD_URL": "http://127.0.0.1:8000/v1/session/reward",
        "SEAMLESS_SESSION_KEY": "sk-secret",
    }


def test_a_slash_at_the_end_changes_nothing_and_the_key_is_not_shown() -> None:
    again = Endpoint("http://127.0.0.1:8000/", "sk-secret", "group/7")
    assert again == ENDPOINT and "sk-secret" not in repr(again)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "http://host/v1", "http://host/v1/", "unix:///x"])
def test_an_address_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        Endpoint(url, "key", "id")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, (None, {})),
        (1, (1.0, {})),
        (True, (1.0, {})),
        ({"reward": -0.5, "steps": 3}, (-0.5, {"steps": 3})),
        ({"reward": None, "why": "none"}, (None, {"why": "none"})),
    ],
)
def test_rewards_are_read(value: object, expected: object) -> None:
    assert reward_of(value) == expected


@pytest.mark.parametrize("value", ["1", {}, {"score": 1}, {"reward": "1"}, math.nan, {"reward": math.inf}, [1.0]])
def test_what_is_no_reward_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"reward|is no finite number"):
        reward_of(value)


def test_an_outcome_pickles() -> None:
    outcome = AgentOutcome(AgentStatus.FINISHED, 1.0, 0, "out", 0.5, {"a": 1})
    assert pickle.loads(pickle.dumps(outcome)) == outcome


def test_what_either_name_of_the_variable_excepts_stays_excepted() -> None:
    endpoint = Endpoint("http://10.0.0.7:8000", "s", "key")
    environ = {"http_proxy": "http://proxy:3128", "no_proxy": "a, b", "NO_PROXY": "b,c"}
    assert around_proxy(endpoint, environ) == dict.fromkeys(("no_proxy", "NO_PROXY"), "a,b,c,10.0.0.7")
    assert around_proxy(endpoint, {**environ, "NO_PROXY": "c, 10.0.0.7"}) == {}
