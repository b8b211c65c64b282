"""verl's vLLM server actor, which also serves its engine over TCP, and the replica class that starts it.

Calls come over TCP, from data planes; verl's own `generate` is closed. Commands come over Ray, where no call waits
before them. verl's pause (`abort_all_requests`) and ours are one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import ray
from numpy.typing import NDArray
from verl.single_controller.ray import RayClassWithInitArgs
from verl.utils.tracking import RLInsightLogger
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.utils import qwen2_5_vl_dedup_image_tokens, run_uvicorn
from verl.workers.rollout.vllm_rollout import vllm_async_server
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.third_party import pynvml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from seamless_verl.config.roles import engine_option
from seamless_verl.errors import ConfigError, EngineStartError
from seamless_verl.platform.adaptation import rebound
from seamless_verl.platform.nvml import UtilizationSampler, utilization_sampler
from seamless_verl.replica.engine_load import broken_seal, load_paused, load_sealed, show_broken_seal
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.replica.rereading import Rereading
from seamless_verl.replica.scheduler import SCHEDULER_CLS, EngineCounts
from seamless_verl.replica.worker_extension import KV_CACHE, check_replies, extension_name
from seamless_verl.resources.ledger.activity import Activity, DeviceUse, NodeActivity
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.observation import CacheUse
from seamless_verl.rollout.shared_samples import SharedSample, parts_of
from seamless_verl.runtime.checkpoint_marker import system_id
from seamless_verl.runtime.own_log import OwnLog, stream_names
from seamless_verl.runtime.pictures import takes_recorded_prompts
from seamless_verl.runtime.process import freeze_imports, show_log, stack_report
from seamless_verl.transport import EngineServer, serve_engine
from seamless_verl.weights.transfer import SeamlessReplicaWorker, node_id

logger = logging.getLogger(__name__)
WEIGHTS = "weights"
PARTS = (WEIGHTS, KV_CACHE)  # tags of vLLM's sleep mode
HTTP_PATHS = frozenset(("/health", "/metrics"))  # for a monitor, such as verl's `rollout.prometheus`
UNKNOWN = -1  # the version of weights of which no load has ended
LOOPBACK = "127.0.0.1"
KV_STORES = ("kv_transfer_config", "kv_offloading_size")  # beside the engine's cache
LEARNED_AT_ONCE = 2000  # tokens of other replicas, between two steps: some ten milliseconds
END_S = 10.0  # for an engine's processes to end by themselves
PAST_THE_DATA_PLANE = (
    "a replica's server was called past the data plane, which records the weight version of each token. Generate with"
    " the `llm_client` that the trainer gives to `actor_rollout_ref.rollout.agent.agent_loop_manager_class`"
)
OUTER_ERRORS = ("Engine core initialization failed", "WorkerProc initialization failed")  # the cause is in their log


def collapsed_by(processor: Any) -> Callable[[list[int]], list[int]]:
    """What makes one placeholder of each image in the ids of a prompt, by the model's processor."""
    return partial(qwen2_5_vl_dedup_image_tokens, processor=processor) if takes_recorded_prompts(processor) else list


class EngineArguments(FlexibleArgumentParser):  # type: ignore[misc]
    """Parses vLLM's arguments; what it refuses is an error here, where argparse would end the process of the actor."""

    def error(self, message: str) -> NoReturn:
        """As argparse's, with an error to raise.

        Raises:
            EngineStartError: always.
        """
        raise EngineStartError(message, stream_names())


class SeamlessServer(vLLMHttpServer):  # type: ignore[misc]
    """verl's server; the actor of node 0 has the engine and the TCP server."""

    source: AsyncLLMSource | None = None
    engine_server: EngineServer | None = None
    counts: EngineCounts
    gains: tuple[int, float] = (0, 0.0)  # of drafts, as the workers said last
    activity: Activity
    updating: asyncio.Lock
    busy = False
    loaded: int | None = None  # the version last loaded; None after a load that failed
    pause_s = 0.0  # seconds of the last load's pause
    ending = False
    rereading: Rereading | None = None
    utilization: UtilizationSampler | None = None  # on NVIDIA's devices
    put_away: frozenset[str] = frozenset()  # of PARTS: what is not in the device's memory
    kept_weights = False  # the cache was put away alone, by `put_cache_away` and not by vLLM's sleep

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        show_log()
        self.updating = asyncio.Lock()  # loads, sleeps: one at a time; who asks or resumes waits for them
        super().__init__(*args, **kwargs)

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """As verl's; where the engine does not start, the error has what its processes wrote of it.

        Raises:
            EngineStartError: vLLM refused its arguments, or a process of it ended.
        """
        log = OwnLog()
        try:
            with rebound(vllm_async_server, FlexibleArgumentParser=EngineArguments):
                await super().launch_server(*args, **kwargs)
        except Exception as error:
            is_outer = any(text in str(error) for text in OUTER_ERRORS)
            cause = log.last_error(besides=OUTER_ERRORS) if is_outer else None
            if cause is None:
                raise
            raise EngineStartError(cause, stream_names()) from error

    async def run_server(self, args: Any) -> None:
        """Starts the engine, and of vLLM's HTTP API only what a monitor asks for, on the loopback address.

        verl serves all of it without a key, past journal and limits. verl's own monitor asks from another machine.
        """
        monitored = self.config.prometheus.enable or RLInsightLogger.enabled()
        serve = partial(serve_only, HTTP_PATHS, None if monitored else LOOPBACK)
        with rebound(vllm_async_server, run_uvicorn=serve):
            await super().run_server(args)
        check_replies(await self.engine.collective_rpc("end_with", args=(os.getpid(), system_id())))

    async def listen(self, token: str, devices: Sequence[str], keep_kv: bool = False) -> tuple[str, int]:
        """Serves the engine over TCP to clients with the token; returns host and port. A second call changes nothing.

        The ledger records the engine's activity for the replica's `devices`.
        """
        if self.engine_server is None:
            self.activity = Activity(f"replica-{self.replica_rank}", devices)
            name = f"replica-{self.replica_rank}"
            recording = check_replies(await self.engine.collective_rpc("record_own_logprobs"))
            self.counts = EngineCounts(self.engine)
            self.source = AsyncLLMSource(
                self.engine,
                version=self.global_steps or 0,
                replica_id=name,
                keep_kv=keep_kv,
                on_busy=self.record_busy,
                own_logprobs=True,
                of_drafts=all(recording),
                lora=LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH) if self.lora_as_adapter else None,
                collapsed=collapsed_by(self.model_config.processor),
            )
            self.rereading = Rereading(self.engine, self.source.lora)
            self.engine_server = await serve_engine(self.source, self._server_address, 0, token=token, replica_id=name)
            self.engine.output_handler.add_done_callback(self.engine_died)
            self.utilization = utilization_sampler(pynvml) if current_platform.is_cuda() else None
            freeze_imports()
        return self._server_address, self.engine_server.port

    async def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses a call past the data plane: its tokens would have one version, and its end would wait for a resume
        that waits behind a thousand of them."""
        raise RuntimeError(PAST_THE_DATA_PLANE)

    def record_busy(self, busy: bool) -> None:
        """Records whether the engine has a running request; called by its source."""
        if busy is not self.busy:
            self.busy = busy
            (self.activity.begin if busy else self.activity.end)(DeviceUse.ROLLOUT)

    def engine_died(self, replies: asyncio.Task[None]) -> None:
        """Called when the engine's replies end. If its process died, this process ends too, so that every caller that
        waits for the engine gets an error at once; with vLLM alone some would wait for ever."""
        if self.ending or replies.cancelled():
            return
        logger.critical("replica-%s: its engine's process died, and this server ends with it", self.replica_rank)
        self._end_at_once()

    def _end_at_once(self) -> None:
        try:
            self.engine.shutdown(timeout=0)  # its other processes lose their parent
        finally:
            os._exit(1)

    async def take_activity(self) -> NodeActivity:
        """The activity of its devices since the last report."""
        busy = () if self.utilization is None else self.utilization.take()
        return NodeActivity(self.activity.take(), node_id(), busy)

    async def stack_report(self) -> str:
        """Every thread and task of this process, as text."""
        return stack_report(asyncio.get_running_loop())

    async def status(self) -> tuple[int, str | None]:
        """The version of its weights, and the mode of its pause, None while it generates.

        The reply comes after a load that is under way: within one the engine pauses, and has other weights already.
        After a load that failed the version is UNKNOWN.
        """
        assert self.source is not None
        async with self.updating:
            version = UNKNOWN if self.loaded is None else self.source.version
            return version, None if self.source.paused is None else self.source.paused.value

    async def cache_use(self) -> CacheUse:
        """What the engine's KV cache has spared and cost, and its drafts, since it listens."""
        assert self.source is not None
        counts = self.counts
        cache, drafts = (self.source.prompt_tokens, self.source.cached_tokens), (counts.drafted, counts.accepted)
        return CacheUse(*cache, counts.preempted, *drafts, *self.gains)

    async def learn(self, samples: Sequence[SharedSample]) -> None:
        """Has the engine draft from samples of other replicas, too; its steps go on between parts of them.

        Asks it, besides, what its drafts have brought.
        """
        for part in parts_of(samples, LEARNED_AT_ONCE):
            replies = check_replies(await self.engine.collective_rpc("learn", args=(pickle.dumps(part),)))
            self.gains = next((tuple(gains) for gains in replies if gains is not None), self.gains)

    async def pause(self, mode: str) -> None:
        assert self.source is not None
        await self._end_reading()
        await self.source.pause(PauseMode(mode))

    async def _end_reading(self) -> None:
        if self.rereading is not None:
            await self.rereading.end()

    async def reread(
        self, ids: Sequence[int], version: int, patience_s: float, temperature: float = 1.0
    ) -> NDArray[np.float32] | None:
        """The logprobs, float32 [tokens - 1], that the weights of this version give to each of these ids but the first.

        Waits for that version. None where the engine has a later one, or pauses before it has read them, for which the
        pause waits that long.
        """
        assert self.source is not None and self.rereading is not None
        while self.loaded != version or self.source.paused is not None:
            if self.loaded is not None and self.loaded > version:
                return None
            await self.rereading.resumed.wait()
        read = await self.rereading.logprobs(ids, patience_s, temperature)
        return read if self.loaded == version else None

    async def verify_weights(self, version: int, staged: Any) -> str | None:
        """As `broken_seal`, of this version; None, too, while its weights are put away."""
        async with self.updating:  # they are not put away, or loaded, while they are read
            return await broken_seal(self.engine, staged) if self.loaded == version else None

    async def update_weights(self, version: int, weights: Any) -> None:
        """Pauses, loads these weights and resumes; with this version loaded already it only resumes.

        Weights and cache that were put away get their memory back, the cache after the weights are loaded. Where the
        seal does not fit, they are loaded again; where it then does not, this server ends, and is started again.
        """
        async with self.updating:
            if self.loaded == version and WEIGHTS not in self.put_away:
                try:
                    await self.take_cache()
                    await self._resume()
                    return
                except Exception as error:
                    show_broken_seal(self.replica_rank, error, "It loads again")
            self.loaded = None  # a load that fails half-way leaves no known version
            load = partial(self._load, version)
            await load_sealed(self.engine, weights, self.replica_rank, load=load, end=self._end_at_once)

    async def _load(self, version: int) -> None:
        async def commit() -> None:
            await self.take_cache()
            await self.clear_kv_cache()
            await self.set_global_steps(version)

        if WEIGHTS in self.put_away:
            await self.wake_up([WEIGHTS])
        # What is read ends before the pause, which would else come after the load. No version is loaded, so nothing
        # begins to read from here on.
        await self._end_reading()
        self.pause_s = await load_paused(
            self.engine,
            (version, self.config.checkpoint_engine.update_weights_bucket_megabytes << 20),
            pause=partial(self.pause, PauseMode.KEEP),
            commit=commit,
            resume=self._resume,
            loading=partial(self.activity.doing, DeviceUse.SYNC),
            agreed=self.config.data_parallel_size > 1,
        )

    async def sleep(self) -> None:
        """Puts weights and cache away, as verl does; a second call changes nothing."""
        if self.node_rank != 0 or self.rollout_mode is not RolloutMode.HYBRID or not self.config.free_cache_engine:
            await super().sleep()
            return
        async with self.updating:
            if self.put_away == frozenset(PARTS):
                return
            if self.kept_weights:
                await self.take_cache()
            if self.put_away:  # a load failed half-way; vLLM puts nothing away from there
                await self.wake_up(sorted(self.put_away))
            if self.lora_as_adapter:
                check_replies(await self.engine.collective_rpc("remember_weights"))
            self.loaded, self.put_away = None, frozenset(PARTS)
            await super().sleep()
            if not self.lora_as_adapter:  # beside an adapter the model's own weights come from nowhere else
                check_replies(await self.engine.collective_rpc("drop_memory"))

    async def put_cache_away(self) -> None:
        """Puts the KV cache away and keeps the weights; repeats what failed half-way."""
        async with self.updating:
            if self.put_away and not self.kept_weights:  # asleep
                return
            await self.engine.reset_prefix_cache(reset_connector=True)  # its contents are lost
            self.put_away, self.kept_weights = frozenset([KV_CACHE]), True
            check_replies(await self.engine.collective_rpc("put_cache_away"))

    async def take_cache(self) -> None:
        """Takes the KV cache back if it was put away; generation stays paused."""
        if KV_CACHE not in self.put_away:
            return
        if self.kept_weights:  # vLLM does not know that the cache was away
            check_replies(await self.engine.collective_rpc("take_cache_back"))
            self.put_away, self.kept_weights = frozenset(), False
        else:
            await self.wake_up([KV_CACHE])  # vLLM schedules again once all is awake
            await self.pause(PauseMode.KEEP)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await super().wake_up(tags)
        self.put_away -= frozenset(PARTS if tags is None else tags)

    async def last_pause_s(self) -> float:
        """Seconds for which the last load paused generation, from its beginning until the resume."""
        return self.pause_s

    async def resume(self) -> None:
        """Generates again, after a load that is under way: tokens within one would have the wrong version."""
        async with self.updating:
            await self._resume()

    async def _resume(self) -> None:
        assert self.source is not None
        await self.source.resume()
        if self.rereading is not None:
            self.rereading.engine_resumed()

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        if self.source is not None:
            self.source.paused = PauseMode.ABORT
            self.record_busy(False)
        return dict(await super().abort_all_requests(reset_prefix_cache, reject_request))

    async def resume_engine_generation(self) -> None:
        await super().resume_engine_generation()
        if self.source is not None:
            self.source.paused = None
            self.record_busy(bool(self.source.in_flight))

    async def clear_kv_cache(self) -> None:
        """After a load: the KV cache is left to the source's commit, the other caches are cleared as in verl."""
        if self.source is None:
            await super().clear_kv_cache()
        elif self.node_rank == 0 and self.engine.model_config.is_multimodal_model:
            await self.engine.reset_mm_cache()
            await self.engine.reset_encoder_cache()

    async def end(self) -> None:
        """Stops the engine in order: killed processes would leave shared memory behind."""
        self.ending = True
        if self.utilization is not None:
            self.utilization.close()
        self.engine.shutdown(timeout=END_S)

    async def set_global_steps(self, global_steps: int) -> None:
        if self.source is not None:
            await self.source.commit(global_steps)
        await super().set_global_steps(global_steps)
        self.loaded = global_steps

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        """Sets our scheduler unless the user set one; with theirs, calls that are cut within a grammar fail."""
        super()._preprocess_engine_kwargs(engine_kwargs)
        if (own := engine_option(engine_kwargs, "scheduler_cls")) is None:
            engine_kwargs["scheduler_cls"] = SCHEDULER_CLS
        elif any(engine_option(engine_kwargs, name) is not None for name in KV_STORES):
            key, reason = "rollout.engine_kwargs.vllm.scheduler_cls", "would find KV of old weights in a store"
            raise ConfigError(key, own, reason, f"Leave it out, or {' and '.join(KV_STORES)}")
        if plugin := engine_option(engine_kwargs, "reasoning_parser_plugin"):
            ReasoningParserManager.import_reasoning_parser(plugin)

    def _get_worker_extension_cls(self) -> str:
        return extension_name()


async def serve_only(paths: frozenset[str], host: str | None, app: Any, server_args: Any, server_address: str) -> Any:
    """Serves the app, as verl does, without its other paths, and at `host` where it is not None."""
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") in paths]
    return await run_uvicorn(app, server_args, server_address if host is None else host)


class SeamlessReplica(vLLMReplica):  # type: ignore[misc]
    """verl's replica with our server class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(SeamlessServer)

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        return RayClassWithInitArgs(
            cls=ray.remote(SeamlessReplicaWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )
