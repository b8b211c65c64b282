"""Makes the trainer's workers leave out each optimizer step whose loss or gradient norm is not finite.

verl's Megatron engine steps whatever the gradients are, and one NaN is in every weight after it. Here all ranks decide
together before the step, from their losses and the gradient norm; verl's other engines skip a step for its norm
themselves. A step that is left out changes neither weights nor moments; the learning rate's schedule counts updates,
with steps or without. LIMIT updates one after another without any step end the run, before a commit or a save.

A mini-batch without a token to train, such as one of old tokens that a policy masks, makes no step either: its loss is
0 / 0, or 0, by which moments would still move weights. However many these are, they end no run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from seamless_verl.agent_loops.row_keys import parts_of
from seamless_verl.errors import NotFiniteError

KEYS, ROW = "seamless_keys", "seamless_row"
"""In a batch's `extra_info` the keys of its rows, a line each; and a worker's column with the number of a row."""
LIMIT = 3
SKIPPED = {"actor": "actor/skipped_updates_sum", "critic": "critic/skipped_updates_sum"}
"""verl puts the model's name before what a worker reports, and adds a name with `sum` up over the updates of a step."""
CAUSES = (
    *("rm_scores", "token_level_scores", "token_level_rewards", "rollout_log_probs", "old_log_probs", "ref_log_prob"),
    *("values", "rollout_is_weights", "advantages", "returns"),
)
"""Columns of a batch, each before those that are computed from it."""
NORM, LOSS_OF, EMPTY = "gradient norm", "loss", "no token"
OTHER, LOSS, LARGEST, NOTHING = (len(CAUSES) + i for i in range(4))
Finding = tuple[int, float, str]
"""What is wrong with a sample: the smallest is the worst of all ranks."""
logger = logging.getLogger(__name__)


def around(method: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """The method, by way of `hook`, which gets it as its first argument."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return hook(method, *args, **kwargs)

    return run


def around_loss(loss: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function of verl's, by way of `hook(loss, model_output, data, dp_group)`.

    verl's engines call the same function within the forward pass, with `student_logits`, where a student learns the
    teacher's most likely tokens. Such a call is left to the loss: there is no model output yet.
    """

    @wraps(loss)
    def run(model_output: Any = None, data: Any = None, dp_group: Any = None, **of_logits: Any) -> Any:
        return loss(data=data, **of_logits) if of_logits else hook(loss, model_output, data, dp_group)

    return run


class UpdateHooks:
    """Wraps verl's TrainingWorker and its engine: the whole update, each mini-batch in it, and its optimizer step.

    An update has as many optimizer steps as mini-batches, times epochs; one returns the gradient norm.
    """

    update: Callable[..., Any]
    mini_batch: Callable[..., Any]
    optimizer_step: Callable[..., Any]

    def __init__(self, worker: Any) -> None:
        self.engine = worker.engine
        worker.train_mini_batch = around(worker.train_mini_batch, self.update)
        self.engine.train_batch = around(self.engine.train_batch, self.mini_batch)
        self.engine.optimizer_step = around(self.engine.optimizer_step, self.optimizer_step)


class FiniteUpdates(UpdateHooks):
    """Leaves steps out that are not finite; every rank of the actor, and of the critic, has one.

    Owned state: whether its losses of the mini-batch were finite, and the rows whose loss was not; how many steps the
    update left out, whether it made one, and how many updates in a row made none.
    """

    def __init__(self, worker: Any, model: str) -> None:
        super().__init__(worker)
        self.model = model
        self.keys: list[str] = []  # of the update's rows, of all ranks
        self.finite, self.blamed = True, list[int]()  # the losses of the mini-batch; rows whose loss is not
        self.batch: Any = None  # the mini-batch that is trained
        self.left_out = self.worst = ""  # what was not finite, where the mini-batch made no step; and in which sample
        self.skipped = self.in_a_row = 0
        self.stepped = self.failed = False  # whether the update made a step, and had numbers that are not finite

    def update(self, train_mini_batch: Callable[[Any], Any], data: Any) -> Any:
        """Adds how many of its optimizer steps were left out to its metrics.

        Raises:
            NotFiniteError: it is the last of LIMIT in a row without an optimizer step; on every rank.
        """
        self.keys, self.skipped = tu.pop(data, KEYS, default="").splitlines(), 0
        self.stepped = self.failed = False
        data[ROW] = torch.arange(len(data)) + self.engine.get_data_parallel_rank() * len(data)
        output = train_mini_batch(data)
        self.in_a_row = 0 if self.stepped else self.in_a_row + self.failed
        if self.in_a_row >= LIMIT:
            raise NotFiniteError(f"{self.worst}. That was the update number {self.in_a_row} in a row", WAY_OUT)
        if output is not None:
            tu.get(output, "metrics")[SKIPPED[self.model].removeprefix(f"{self.model}/")] = self.skipped
        return output

    def mini_batch(self, train_batch: Callable[..., Any], data: Any, loss_function: Callable[..., Any]) -> Any:
        self.finite, self.blamed, self.left_out, self.batch = True, [], "", data
        output = train_batch(data, loss_function=around_loss(loss_function, self._checked_loss))
        searches = getattr(self.engine, "scaler", None) is not None  # fp16: overflows find the scale of the loss
        self.stepped |= not self.left_out or (searches and self.left_out == NORM)
        self.failed |= self.left_out in (LOSS_OF, NORM)
        if self.left_out:
            self.skipped += 1
            self._report(data)
        self.batch = None
        return output

    def _is_empty(self) -> bool:
        """Whether the mini-batch has no token to train, on any rank; verl counts them before its forward pass."""
        return tu.get_non_tensor_data(self.batch, "batch_num_tokens", None) == 0

    def _checked_loss(self, loss: Callable[..., Any], model_output: Any, data: Any, dp_group: Any) -> Any:
        """The loss of a micro-batch; notes one that is not finite, and the rows that have one."""
        value, metrics = loss(model_output=model_output, data=data, dp_group=dp_group)
        if not torch.isfinite(value).all() and not self._is_empty():
            self.finite = False
            self.blamed += rows_with_such_a_loss(loss, model_output, data, dp_group)
        return value, metrics

    def optimizer_step(self, optimizer_step: Callable[[], Any]) -> Any:
        """The step where loss and gradient norm are finite; returns the norm, NaN where it is not known."""
        if self._is_empty():
            self.left_out = EMPTY
            return 0.0
        if not of_all_ranks(self.finite):
            self.left_out = LOSS_OF
            return math.nan
        megatron = hasattr(self.engine.optimizer, "step_with_ready_grads")
        norm = self._megatron_step(self.engine.optimizer, optimizer_step) if megatron else optimizer_step()
        if not math.isfinite(norm):
            self.left_out = NORM
        return norm

    @staticmethod
    def _megatron_step(optimizer: Any, optimizer_step: Callable[[], Any]) -> Any:
        """A step that changes nothing when the norm, which Megatron measures before it clips, is not finite."""
        measure, clip, step = optimizer.get_grad_norm, optimizer.clip_grad_norm, optimizer.step_with_ready_grads
        norms = list[Any]()

        def measured() -> Any:
            norms.append(measure())
            return norms[-1]

        def clipped(limit: float) -> Any:  # by an optimizer that is not one of several
            norms.append(clip(limit))
            return norms[-1]

        def step_if_finite() -> bool:
            norm = norms[-1] if norms else measured()  # it is not measured where nothing is clipped
            if of_all_ranks(math.isfinite(norm)):
                return bool(step())
            norms.append(math.nan)
            return True

        optimizer.get_grad_norm, optimizer.clip_grad_norm = measured, clipped
        optimizer.step_with_ready_grads = step_if_finite
        try:
            optimizer_step()
        finally:
            del optimizer.get_grad_norm, optimizer.clip_grad_norm, optimizer.step_with_ready_grads
        return norms[-1]

    def _report(self, data: Any) -> None:
        if self.left_out == EMPTY:
            if torch.distributed.get_rank() == 0:
                logger.warning("The %s made no optimizer step: its mini-batch has no token to train", self.model)
            return
        _, _, worst = min(gathered(min(self._findings(data))))
        self.worst = f"The {self.model} made no optimizer step, for its {self.left_out} is not finite. {worst}"
        if torch.distributed.get_rank() == 0:
            logger.warning("%s. The run ends after %d updates in a row without a step", self.worst, LIMIT)

    def _findings(self, data: Any) -> Iterator[Finding]:
        """What is wrong with the samples of this rank's mini-batch."""
        rows = data[ROW].tolist()
        tensors = ((name, column) for name, column in data.items() if isinstance(column, torch.Tensor))
        columns = {name: column for name, column in tensors if column.is_floating_point()}
        for name, column in columns.items():
            for row, values in zip(rows, column.unbind(), strict=True):
                if len(bad := (~values.isfinite()).flatten().nonzero()):
                    value, place = float(values.flatten()[bad[0]]), int(bad[0])
                    order = CAUSES.index(name) if name in CAUSES else OTHER
                    yield order, row, f"The worst is {self._sample(row)}: its {name} has {value} at place {place}"
        for row in self.blamed:
            yield LOSS, row, f"The worst is {self._sample(row)}: its loss is not finite, though its columns are"
        if "advantages" in columns:
            sizes = [float(values.abs().max()) if values.numel() else 0.0 for values in columns["advantages"].unbind()]
            largest, row = max(zip(sizes, rows, strict=True))
            its = f"The largest advantage, {largest:g}, is that of {self._sample(row)}"
            yield LARGEST, -largest, f"No sample's columns or loss are the cause. {its}"
        yield NOTHING, 0, "No sample is the cause"

    def _sample(self, row: int) -> str:
        """The sample in words."""
        if not self.keys:
            return f"row {row}"
        uid, session, part = parts_of(self.keys[row])
        return f"prompt {uid}, session {session}, row {part}"


WAY_OUT = (
    "Nothing of these steps is in the weights, and the last checkpoint stays: repair what gives such numbers, and the "
    "same command goes on from it"
)


def rows_with_such_a_loss(loss: Callable[..., Any], model_output: Any, data: Any, dp_group: Any) -> list[int]:
    """The numbers of the rows of a micro-batch that have a loss which is not finite by themselves; else all of them."""
    rows, outputs = data[ROW].tolist(), tu.get_tensordict(dict(model_output))
    found = list[int]()
    with torch.no_grad():
        for i, row in enumerate(rows):
            one, of_one = (tu.index_select_tensor_dict(whole, [i]) for whole in (data, outputs))
            value, _ = loss(model_output=of_one, data=one, dp_group=dp_group)
            found += [] if torch.isfinite(value).all() else [row]
    return found or rows


def of_all_ranks(holds: bool) -> bool:
    """Whether it holds on every rank of this model; all of them call it together."""
    flag = torch.tensor(float(holds), device=get_device_name())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
    return bool(flag)


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, which call it together."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def has_finite_weights(engine: Any) -> bool:
    """Whether all weights of an engine of verl are finite, on every rank; all of them call it together."""
    with engine.eval_mode(), torch.no_grad():
        chunks = engine.module if isinstance(engine.module, list) else [engine.module]
        parameters = (getattr(weight, "_local_tensor", weight) for chunk in chunks for weight in chunk.parameters())
        ends = [torch.stack(torch.aminmax(weight)) for weight in parameters if weight.numel()]
        finite = all(bool(torch.isfinite(end).all()) for end in ends)
    return of_all_ranks(finite)
