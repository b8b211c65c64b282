"""Addresses and keys that cannot be used are refused before a request, by all clients."""

from __future__ import annotations

import pytest

from seamless_verl.client import AsyncClient, Client
from seamless_verl.client.connection import RunConnection
from seamless_verl.client.http import bearer, checked_url
from seamless_verl.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("h:1", "it does not begin with"),
        ("http://HOST:PORT", "Invalid port: 'PORT'"),
        ("https://[::1", "Invalid port"),
        ("http://", "it names no host"),
        ("http://:80", "it names no host"),
        ("http://h:99999", "there is no port 99999"),
        ("http://h:1 ", "there is a space in it"),
        ("http://h:1/?run=a", "a path cannot follow it"),
    ],
)
def test_what_is_no_address_is_refused(url: str, why: str) -> None:
    for opening in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=f"is no http address: {why}") as raised:
            opening(url, "key")
        assert raised.value.value == url and raised.value.key == "url"
    with pytest.raises(ConfigError, match=why):
        RunConnection(url, "key", runner="r")


@pytest.mark.parametrize("url", ["http://h:1", "http://127.0.0.1:80/", "https://[::1]:8", "https://h/below/it/"])
def test_addresses_lose_a_slash_at_their_end(url: str) -> None:
    assert checked_url(url) == url.rstrip("/")


@pytest.mark.parametrize("key", ["secret\r", "secr\u00e9t", "secret ", " secret", "secret\udce9"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as raised:
        Client("http://h:1", key)
    assert "secr" not in str(raised.value)
    with pytest.raises(ConfigError, match="printable ASCII"):
        RunConnection("http://h:1", key, runner="r")


def test_a_key_may_have_spaces_within() -> None:
    assert bearer("a key") == {"authorization": "Bearer a key"}
