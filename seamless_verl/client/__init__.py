"""The client of a run's admin API: sessions from outside. It needs neither torch, Ray nor verl."""

from __future__ import annotations

from seamless_verl.client.admin_file import AdminFile
from seamless_verl.client.http import AsyncClient, Client
from seamless_verl.client.messages import OpenedSession, SessionView

__all__ = ["AdminFile", "AsyncClient", "Client", "OpenedSession", "SessionView"]
