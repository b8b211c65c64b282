"""Rows of sessions in which an agent shows pictures, made as an agent loop's worker makes them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils.tokenizer import hf_processor, hf_tokenizer

from seamless_verl.agent_loops.rows import Row, outputs_of, rows_of
from seamless_verl.data_plane.finished_sessions import FinishedSession
from seamless_verl.platform.adaptation import plain_class
from seamless_verl.platform.without_torchvision import take_images_without_torchvision
from seamless_verl.trajectory.images import PromptImage, stored_images
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish, Segment, Turn, logprobs, tokens
from seamless_verl.trajectory.sequences import assemble
from seamless_verl.trajectory.session import SessionRecord
from support.qwen_vision import MARKS, picture

RED, BLUE = picture("red"), picture("blue", 56, 56)
SIZES = {RED: 2, BLUE: 4}  # tokens


class Worker(plain_class(AgentLoopWorker)):  # type: ignore[misc]
    """verl's own, of which rows ask the inputs of the model."""

    def __init__(self, folder: Path) -> None:
        take_images_without_torchvision()
        self.processor, self.tokenizer, self.compares_turns = hf_processor(folder), hf_tokenizer(folder), False
        self.mm_processor_kwargs: dict[str, Any] = {}


def session(tokenizer: Any, pictures: Sequence[bytes]) -> FinishedSession:
    """A turn for each of the pictures, which shows it."""
    names = {data: sha256(data).hexdigest() for data in pictures}
    record = SessionRecord("p", "s", images={name: data for data, name in names.items()})
    start, end, pad, _ = (tokenizer.convert_tokens_to_ids(mark) for mark in MARKS)
    ids: list[int] = []
    images: list[PromptImage] = []
    for number, data in enumerate(pictures):
        images.append(PromptImage(len(ids) + 1, SIZES[data], names[data]))
        ids += [start, *[pad] * SIZES[data], end, *b"what?"]
        said = list(b"it is")
        segments = [Segment(tokens(said), logprobs([-1.0] * len(said)), 0, "r")]
        request = {"gateway": {"images": stored_images(images)}}
        record.add_turn(Turn(str(number), tokens(ids), segments, Finish.STOP, request))
        ids += said
    sequences = assemble(record, TrainAll(), 0).sequences
    return FinishedSession(sequences, {}, len(pictures), images=record.images)


def vision_rows(folder: Path, shown: Sequence[Sequence[bytes]]) -> list[Row]:
    """The rows of a session for each entry of `shown`; the model is in the folder."""
    worker = Worker(folder)
    rows: list[Row] = []
    for number, pictures in enumerate(shown):
        sample = {"uid": "p", "session_id": str(number), "global_steps": 1}
        rows += rows_of(outputs_of(session(worker.tokenizer, pictures), 1.0, 0.0), worker, sample)
    return rows
