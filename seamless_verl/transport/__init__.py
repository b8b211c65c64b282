"""Engines over TCP: one connection carries all calls between a gateway and a replica."""

from seamless_verl.transport.client import RemoteEngine
from seamless_verl.transport.server import EngineServer, serve_engine

__all__ = ["EngineServer", "RemoteEngine", "serve_engine"]
