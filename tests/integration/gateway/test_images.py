"""Images that agents send to a model that takes them: what is asked of the engine, recorded and continued."""

from __future__ import annotations

import pickle
import sqlite3
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.gateway import EOS, GatewayHarness, gateway_harness
from support.qwen_vision import data_url, make_qwen_vision, picture

from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.server import takes_images
from seamless_verl.journal import SqliteJournal
from seamless_verl.runtime.pictures import picture_of
from seamless_verl.trajectory.images import images_of

pytestmark = pytest.mark.integration
OPTIONS = ("--served-model-name", "nano")
RED, BLUE = picture("red"), picture("blue", form="JPEG")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    make_qwen_vision(folder / "model")
    return folder


def part(path: str, data: bytes) -> dict[str, Any]:
    url = data_url(data)
    if path == "chat/completions":
        return {"type": "image_url", "image_url": {"url": url}}
    if path == "responses":
        return {"type": "input_image", "image_url": url}
    encoded = url.partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}


def user(path: str, text: str, *images: bytes) -> dict[str, Any]:
    kind = "input_text" if path == "responses" else "text"
    return {"role": "user", "content": [*(part(path, one) for one in images), {"type": kind, "text": text}]}


async def ask(harness: GatewayHarness, path: str, messages: list[Any], **more: Any) -> httpx.Response:
    asked: dict[str, Any] = {"input": messages} if path == "responses" else {"messages": messages, "max_tokens": 8}
    url = f"{harness.session['base_url']}/{path}"
    return await harness.http.post(url, json={"model": "nano", **asked, **more})


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_each_api_gives_the_model_its_images(model: Path, path: str) -> None:
    async with gateway_harness(model) as harness:
        harness.set_replies("fine")
        reply = await ask(harness, path, [user(path, "what?", RED, BLUE)])
        assert reply.status_code == 200, reply.text
        call = harness.source.calls[-1]
        media = pickle.loads(call.media)
        assert [one.tobytes() for one in media["multi_modal_data"]["image"]] == [
            picture_of(data).tobytes() for data in (RED, BLUE)
        ]
        first, second = call.images
        assert media["multi_modal_uuids"]["image"] == [first.digest, second.digest]
        assert first.length == second.length == 2 and second.start == first.start + 4  # the ends of both are between
        assert set(call.files) == {first.digest, second.digest}
        assert "base64" not in str(call.stored_request()) and images_of(call.stored_request()) == call.images


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("later", [(), (RED,), (BLUE,)], ids=["text", "same image", "other image"])
async def test_a_later_turn_begins_with_the_recorded_ids(model: Path, path: str, later: tuple[bytes, ...]) -> None:
    """The reply is written as no template would render it, so that a prompt that is rendered whole would differ."""
    async with gateway_harness(model) as harness:
        harness.set_replies("fine", "good")
        harness.source.replies[0].ids = odd = [*harness.ids("fi"), 300, *harness.ids("ne"), EOS]
        first = [user(path, "what?", RED)]
        reply = await ask(harness, path, first)
        assert reply.status_code == 200, reply.text
        answer = {"role": "assistant", "content": harness.tokenizer.decode(odd, skip_special_tokens=True)}
        reply = await ask(harness, path, [*first, answer, user(path, "and?", *later)])
        assert reply.status_code == 200, reply.text
        one, two = harness.source.calls
        recorded = [*one.prompt_ids, *odd]
        assert list(two.prompt_ids)[: len(recorded)] == recorded
        assert [image.digest for image in two.images] == [sha256(data).hexdigest() for data in (RED, *later)]
        assert two.images[0] == one.images[0] and all(image.length == 2 for image in two.images)
        pad = harness.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        assert list(two.prompt_ids).count(pad) == 2 * len(two.images)
        assert all(two.prompt_ids[image.start] == pad for image in two.images)


BAD: dict[str, tuple[Any, int, str]] = {
    "no format": ({"url": data_url(b"no picture at all")}, 400, "cannot be read"),
    "cut off": ({"url": data_url(picture("red", 280, 280)[:300])}, 400, "cannot be read"),
    "no base64": ({"url": "data:image/png;base64,@@@"}, 400, "no base64"),
    "an address on the network": ({"url": "http://127.0.0.1:1/a.png"}, 400, "http://127.0.0.1:1/a.png"),
    "a file of the host": ({"url": "file:///etc/passwd"}, 400, "file:///etc/passwd"),
    "50 MB": ({"url": "data:image/png;base64," + "A" * (50 * 10**6 * 4 // 3)}, 413, "bytes"),
    "21 MiB": ({"url": "data:image/png;base64," + "A" * (28 << 20)}, 413, "21.0 MiB"),
    "no address": ({}, 400, "no address"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_an_image_that_cannot_be_taken_is_named_and_loses_nothing(model: Path, kind: str) -> None:
    given, status, said = BAD[kind]
    path = "chat/completions"
    async with gateway_harness(model) as harness:
        harness.set_replies("fine", "good")
        first = [user(path, "what?", RED)]
        assert (await ask(harness, path, first)).status_code == 200
        answer = {"role": "assistant", "content": "fine"}
        bad = {"role": "user", "content": [{"type": "image_url", "image_url": given}]}
        reply = await ask(harness, path, [*first, answer, bad])
        assert reply.status_code == status, reply.text
        assert said in reply.text and len(reply.text) < 1000
        assert (await ask(harness, path, [*first, answer, user(path, "and?")])).status_code == 200
        one, two = harness.source.calls
        assert list(two.prompt_ids)[: len(one.prompt_ids)] == list(one.prompt_ids) and two.images == one.images


async def test_other_media_are_still_replaced(model: Path) -> None:
    async with gateway_harness(model) as harness:
        harness.set_replies("fine")
        sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        asked = user("chat/completions", "what?", RED)
        reply = await ask(harness, "chat/completions", [{**asked, "content": [*asked["content"], sound]}])
        assert reply.status_code == 200, reply.text
        assert harness.source.calls[-1].replaced_media == ("audio",) and len(harness.source.calls[-1].images) == 1


async def test_an_image_in_two_turns_is_on_record_once_and_survives_a_restart(model: Path, tmp_path: Path) -> None:
    file, path = tmp_path / "journal.sqlite", "chat/completions"
    first, answer = [user(path, "what?", RED)], {"role": "assistant", "content": "fine"}
    with SqliteJournal(file) as journal:
        async with gateway_harness(model, recorder=JournalRecorder(journal), journal=journal) as harness:
            harness.set_replies("fine", "good")
            assert (await ask(harness, path, first)).status_code == 200
            assert (await ask(harness, path, [*first, answer, user(path, "same?", RED)])).status_code == 200
            key, session_id = harness.session["key"], harness.session["session_id"]
    with SqliteJournal(file) as journal:
        recorder = JournalRecorder(journal)
        async with gateway_harness(model, recorder=recorder, journal=journal) as harness:
            harness.set_replies("well")
            harness.session["base_url"] = f"{harness.gateway.url}/v1"
            harness.http.headers["authorization"] = f"Bearer {key}"
            asked = [*first, answer, user(path, "same?", RED), {"role": "assistant", "content": "good"}]
            assert (await ask(harness, path, [*asked, user(path, "and?")])).status_code == 200
            tree = recorder.record(session_id).tree
            one, two, three = tree.turns.values()
            assert two.match_end is one.end and three.match_end is two.end
            assert pickle.loads(harness.source.calls[-1].media)["multi_modal_uuids"]["image"] == [digest_of(RED)] * 2
            assert recorder.record(session_id).images == {digest_of(RED): RED}
    with sqlite3.connect(file) as db:
        assert db.execute("SELECT digest, data FROM images").fetchall() == [(digest_of(RED), RED)]
        assert "base64" not in str(db.execute("SELECT request FROM calls").fetchall())
    db.close()


def digest_of(data: bytes) -> str:
    return sha256(data).hexdigest()


@pytest.mark.parametrize(("name", "taken"), [("Qwen2VLImageProcessor", True), ("Gemma3ImageProcessor", False)])
def test_images_are_taken_where_engines_read_the_recorded_prompt(
    name: str, taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    processor = SimpleNamespace(image_processor=type(name, (), {})())
    model = SimpleNamespace(supported_mm_limits={"image": None}, get_hf_processor=lambda: processor)
    renderer = SimpleNamespace(get_mm_processor=lambda: SimpleNamespace(info=model))
    client: Any = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=True), renderer=renderer)
    assert takes_images(client) is taken
    assert ("take a model whose image processor is a Qwen2VLImageProcessor" in caplog.text) is not taken
