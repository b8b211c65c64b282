"""Images in prompts: a turn continues another one only where their images are the same files."""

from __future__ import annotations

import numpy as np
import pytest

from seamless_verl.errors import TurnConflictError
from seamless_verl.trajectory.images import ImageKeys, PromptImage, images_of, stored_images
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish, Segment, Turn, logprobs, tokens
from seamless_verl.trajectory.sequences import assemble
from seamless_verl.trajectory.session import SessionRecord

PAD = 9
RED, BLUE = "a" * 64, "b" * 64


def turn(name: str, prompt: list[int], generated: list[int], *images: PromptImage) -> Turn:
    segments = [Segment(tokens(generated), logprobs([-0.5] * len(generated)), 0, "r")]
    return Turn(name, tokens(prompt), segments, Finish.STOP, {"gateway": {"images": stored_images(images)}})


def test_the_same_image_continues_and_another_one_forks_at_its_first_placeholder() -> None:
    record = SessionRecord("p", "s")
    first = record.add_turn(turn("1", [1, PAD, PAD, 2], [5, 6], PromptImage(1, 2, RED)))
    again = [1, PAD, PAD, 2, 5, 6, 3, PAD, PAD, 4]
    second = record.add_turn(turn("2", again, [7], PromptImage(1, 2, RED), PromptImage(7, 2, RED)))
    other = record.add_turn(turn("3", again, [8], PromptImage(1, 2, BLUE), PromptImage(7, 2, RED)))
    assert second.match_end is first.end
    assert sum(map(len, other.match_end.path_from(None))) == 1
    assert list(second.prompt_ids()) == list(other.prompt_ids()) == again
    record.check_integrity()


def test_sequences_have_the_models_ids_and_the_images_in_their_order() -> None:
    record = SessionRecord("p", "s")
    record.add_turn(turn("1", [1, PAD, PAD, 2], [5, 6], PromptImage(1, 2, RED)))
    later = (PromptImage(1, 2, RED), PromptImage(7, 2, BLUE))
    record.add_turn(turn("2", [1, PAD, PAD, 2, 5, 6, 3, PAD, PAD, 4], [7], *later))
    (sequence,) = assemble(record, TrainAll(), 0).sequences
    assert sequence.prompt_ids.tolist() == [1, PAD, PAD, 2] and sequence.prompt_ids.dtype == np.int32
    assert sequence.response_ids.tolist() == [5, 6, 3, PAD, PAD, 4, 7]
    assert sequence.response_mask.tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert sequence.images == (RED, BLUE)


def test_a_turn_that_is_recorded_again_has_the_same_images() -> None:
    record = SessionRecord("p", "s")
    record.add_turn(turn("1", [1, PAD], [5], PromptImage(1, 1, RED)))
    record.add_turn(turn("1", [1, PAD], [5], PromptImage(1, 1, RED)))
    with pytest.raises(TurnConflictError):
        record.add_turn(turn("1", [1, PAD], [5], PromptImage(1, 1, BLUE)))


def test_ids_without_images_are_not_copied() -> None:
    keys, ids = ImageKeys(), tokens([1, 2])
    assert keys.keyed(ids, ()) is ids and keys.restored(ids) is ids and keys.digests(ids) == ()
    assert images_of({}) == () and images_of({"gateway": {"images": [[1, 2, RED]]}}) == (PromptImage(1, 2, RED),)
