"""The requests of runners: what they send, what they get, and why they are refused. The state is `RunnerTasks`'."""

from __future__ import annotations

import secrets
from typing import Any, TypeVar

import msgspec

from seamless_verl.client.messages import (
    PROTOCOL,
    WAIT_S,
    Heartbeat,
    LeaseReply,
    LeaseRequest,
    TaskCompletion,
    TaskReturn,
)
from seamless_verl.data_plane.lease_record import event
from seamless_verl.data_plane.runner_tasks import RunnerTasks
from seamless_verl.errors import LeaseError, shorten
from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.runtime.scores import score_of

T = TypeVar("T")
LEASE_CODES = {"expired": ErrorCode.LEASE_EXPIRED, "unknown": ErrorCode.LEASE_UNKNOWN}  # others: LEASE_ENDED


class RunnerRequests:
    """Serves runners for the gateway; it keeps nothing."""

    def __init__(self, tasks: RunnerTasks) -> None:
        self._tasks = tasks

    async def handle(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A runner's request; raises ApiError. It waits until the leases of an earlier process are known."""
        await self._tasks.started()
        try:
            reply = await self._reply(method, path, body)
        except LeaseError as error:
            raise ApiError(LEASE_CODES.get(error.how, ErrorCode.LEASE_ENDED), str(error), param="lease_id") from error
        built: dict[str, Any] = {} if reply is None else msgspec.to_builtins(reply)
        return built

    async def refused(self, subject: str, error: ApiError) -> None:
        """Records that a program outside of the run was refused."""
        detail = {"code": str(error.code), "message": shorten(error.message)}  # it may repeat a whole body
        await self._tasks.record(event("refused", shorten(subject), detail))

    async def _reply(self, method: str, path: str, body: dict[str, Any]) -> msgspec.Struct | None:
        match method, path.strip("/").split("/")[1:]:
            case "POST", ["lease"]:
                return await self._lease(read_body(body, LeaseRequest))
            case "POST", ["leases", lease_id, "heartbeat"]:
                return Heartbeat(*self._tasks.extend(lease_id))
            case "POST", ["leases", lease_id, "complete"]:
                await self._complete(lease_id, read_body(body, TaskCompletion))
            case "POST", ["leases", lease_id, "return"]:
                given = read_body(body, TaskReturn)
                await self._tasks.take_back(lease_id, given.reason, refused=given.refused)
            case _:
                raise ApiError(ErrorCode.NOT_FOUND, f"Nothing is served at {method} {path}")
        return None

    async def _lease(self, request: LeaseRequest) -> LeaseReply:
        if request.protocol != PROTOCOL:
            message = f"The runner speaks version {request.protocol}, this run {PROTOCOL}. Install the run's release"
            raise ApiError(ErrorCode.PROTOCOL, message, param="protocol")
        lease_id = request.lease_id or secrets.token_hex(16)
        if await self._tasks.end_given(lease_id):
            raise ApiError(ErrorCode.LEASE_ENDED, "A lease of this id was given. Ask with a new id", param="lease_id")
        wait_s = min(request.wait_s, WAIT_S)
        return LeaseReply(await self._tasks.lease(lease_id, request.runner, frozenset(request.agents), wait_s))

    async def _complete(self, lease_id: str, completion: TaskCompletion) -> None:
        if completion.reward is not None:
            try:
                completion = msgspec.structs.replace(completion, reward=score_of(completion.reward))
            except ValueError as error:
                raise ApiError(ErrorCode.MALFORMED, f"reward: {error}. Give one, or null", param="reward") from error
        if not await self._tasks.complete(lease_id, msgspec.to_builtins(completion)):
            raise ApiError(ErrorCode.LEASE_ENDED, "The run no longer wants the task", param="lease_id")


def read_body(body: dict[str, Any], kind: type[T]) -> T:
    """The body as a message; raises ApiError, with the place of the mistake."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise ApiError(ErrorCode.MALFORMED, f"The body cannot be read: {error}") from error
