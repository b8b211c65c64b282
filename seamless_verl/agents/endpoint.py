"""The address and key of an agent's session, and the environment variables that carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from seamless_verl.errors import ConfigError


@dataclass(frozen=True)
class Endpoint:
    """One session for its agent: the gateway's address without `/v1`, the session's own key, its id."""

    base_url: str
    session_key: str = field(repr=False)
    session_id: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError("base_url", self.base_url, "is no http address", "Write it as http://host:port")
        if parts.path.endswith("/v1"):
            raise ConfigError("base_url", self.base_url, "already ends in /v1", "Leave /v1 out: each API adds it")

    @property
    def reward_url(self) -> str:
        """Where the agent, or its harness, may post `{"reward": number, "name": text}` with the session's key; with the
        `call` of a reply it is that turn's reward.
        """
        return f"{self.base_url}/v1/session/reward"


def environment(endpoint: Endpoint) -> dict[str, str]:
    """The variables by which unmodified OpenAI and Anthropic clients find the session.

    OpenAI's clients want the address with `/v1`, Anthropic's without. The key is given both as Anthropic's API key and
    as its bearer token: some clients read only the one, some only the other, and the gateway accepts both.
    """
    return {
        "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
        "OPENAI_API_KEY": endpoint.session_key,
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_API_KEY": endpoint.session_key,
        "ANTHROPIC_AUTH_TOKEN": endpoint.session_key,
        "SEAMLESS_SESSION_ID": endpoint.session_id,
        "SEAMLESS_REWARD_URL": endpoint.reward_url,
        "SEAMLESS_SESSION_KEY": endpoint.session_key,
    }


def around_proxy(endpoint: Endpoint, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which clients reach the gateway without the proxy of `environ`; each reads one of them."""
    listed = f"{environ.get('no_proxy', '')},{environ.get('NO_PROXY', '')}".split(",")
    excepted = dict.fromkeys(name.strip() for name in listed if name.strip())
    host = urlsplit(endpoint.base_url).hostname or ""
    if not any(name.lower().endswith("_proxy") for name in environ) or {"*", host} & excepted.keys():
        return {}
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join((*excepted, host)))


MODEL = "policy"
"""A name under which each gateway serves its model."""
MODEL_VARIABLES = dict.fromkeys(
    (
        "OPENAI_MODEL",
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",  # Claude Code's model for small tasks, by its older
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",  # and its newer name
    ),
    MODEL,
)
"""The variables by which clients choose their model. A command's own `env` may replace them."""
