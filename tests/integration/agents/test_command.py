"""A command's folder, environment, input, output, limits and reward; real processes throughout."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from support.agents import ENDPOINT, limits, private_tmp, python, ran

from seamless_verl.agents.endpoint import MODEL_VARIABLES, environment
from seamless_verl.agents.outcome import AgentStatus

pytestmark = pytest.mark.integration
S = AgentStatus
SHOW = python("import json, os; print(json.dumps(dict(os.environ)))")


def test_it_gets_the_task_twice_and_gives_a_reward() -> None:
    code = """
import json, sys
task = json.load(sys.stdin)
assert task == json.load(open("task.json"))
json.dump({"reward": task["n"] / 4, "steps": 3}, open("reward.json", "w"))
print("héllo")
"""
    outcome = ran(python(code), {"n": 2, "text": "ünï\0"})
    assert (outcome.status, outcome.exit_code, outcome.error) == (S.FINISHED, 0, "")
    assert (outcome.reward, outcome.reward_info, outcome.output) == (0.5, {"steps": 3}, "héllo\n")
    assert 0 < outcome.duration_s < 10 and outcome.error == ""


def test_a_command_that_never_reads_its_input_ends_all_the_same() -> None:
    assert ran("echo done", {"long": "x" * 3_000_000}).output == "done\n"


def test_it_sees_the_session_and_nothing_of_ours_but_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_MODEL", "HTTP_PROXY", "LOGNAME"):
        monkeypatch.setenv(name, "of the parent")
    env = json.loads(ran(SHOW, env={"EXTRA": "1", "ANTHROPIC_MODEL": "m"}).output)
    assert {name: env[name] for name in MODEL_VARIABLES} == MODEL_VARIABLES | {"ANTHROPIC_MODEL": "m"}
    assert environment(ENDPOINT).items() <= env.items() and env["EXTRA"] == "1" and env["LOGNAME"] == "of the parent"
    assert {"WANDB_API_KEY", "HTTP_PROXY"}.isdisjoint(env)
    work = Path(env["PWD"])
    assert Path(env["HOME"]).parent == Path(env["TMPDIR"]).parent == work.parent and work.parent.name != "tmp"


def test_a_command_may_take_the_question_a_file_with_it_and_the_session(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "a.txt").write_text("of the repo")
    question = "what's $HOME `id`?"
    task = {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": question}],
        "extra": {"at": "repo"},
    }
    command = "printf '%s|' {question} {session} {extra.at}; cat {prompt_file} a.txt"
    outcome = ran(command, task, folder=f"{tmp_path}/{{extra.at}}")
    assert outcome.output == f"{question}|{ENDPOINT.session_id}|repo|{question}of the repo"
    missing = ran("true", {"extra": {"at": "gone"}}, folder=f"{tmp_path}/{{extra.at}}")
    assert missing.status is S.TOOL_FAILED and f"{tmp_path}/gone" in missing.error
    assert ran("echo {session}", {"session": "a column"}).output == "a column\n"


def test_the_folder_is_a_copy_of_the_template_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp, template = private_tmp(tmp_path, monkeypatch), tmp_path / "template"
    template.mkdir()
    (template / "tool.sh").write_text("echo from the template")
    (template / "reward.json").write_text('{"reward": 1.0}')
    (template / "away").symlink_to("/nowhere")
    command = ". ./tool.sh; readlink away; echo changed >tool.sh; mkdir -p $HOME/a/b; chmod 500 $HOME/a $HOME/a/b"
    outcome = ran(command, folder=template)
    assert outcome.output == "from the template\n/nowhere\n" and outcome.reward is None
    assert list(tmp.iterdir()) == [] and (template / "tool.sh").read_text() == "echo from the template"


@pytest.mark.parametrize(("command", "kept"), [("exit 0", False), ("exit 1", True), ("sleep 60", True)])
def test_the_working_folder_of_a_failure_is_kept_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, kept: bool
) -> None:
    tmp, folder = private_tmp(tmp_path, monkeypatch), tmp_path / "failed" / "of this run"
    outcome = ran(command, {"n": 1}, keep_failed=folder, limits=limits(wall_s=2.0))
    assert list(tmp.iterdir()) == []
    found = list(folder.iterdir()) if folder.exists() else []
    assert len(found) == kept
    for path in found:
        assert json.loads((path / "task.json").read_text()) == {"n": 1}
        assert outcome.error.endswith(f"; its working folder is kept: {path}") and path.name.startswith(
            ENDPOINT.session_id.replace("/", "_")
        )


def test_a_folder_that_cannot_be_made_fails_no_more_than_the_command_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp = private_tmp(tmp_path, monkeypatch)
    (tmp_path / "file").touch()
    outcome = ran("exit 1", {"n": 1}, keep_failed=tmp_path / "file" / "below")
    assert outcome.status is S.FAILED and outcome.error.startswith("exit code 1; its working folder could not be kept")
    assert list(tmp.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("exit 3", 3, "exit code 3"),
        ("kill -9 $$", -9, "ended by signal SIGKILL"),
        ("kill -40 $$", -40, "ended by signal 40"),
        (["no-such-command"], 127, "exit code 127"),
        (["/etc/passwd"], 126, "exit code 126"),
    ],
)
def test_another_exit_code_is_a_failure(command: str | list[str], code: int, says: str) -> None:
    outcome = ran(command)
    assert (outcome.status, outcome.exit_code, outcome.error) == (S.FAILED, code, says)
    if code in (126, 127):
        assert f"cannot run '{command[0]}'" in outcome.output


@pytest.mark.parametrize("value", ["nul\0", "x" * 200_000])
def test_what_cannot_be_started_is_no_failure_of_its_own_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    tmp = private_tmp(tmp_path, monkeypatch)
    outcome = ran(["echo", "{x}"], {"x": value})
    assert outcome.status == S.TOOL_FAILED and "could not be started" in outcome.error and list(tmp.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ("echo '{{' >reward.json", "is not JSON"),
        ("echo 1.0 >reward.json", "holds 1.0"),
        ("echo '{{}}' >reward.json", "needs the key 'reward'"),
        ("""echo '{{"reward": NaN}}' >reward.json""", "nan of type float is no finite number"),
        ("""echo '{{"reward": "high"}}' >reward.json""", "'high' of type str is no finite number"),
        ("printf '\\377' >reward.json", "is not JSON"),
        ("head -c 100000 /dev/zero | tr '\\0' '[' >reward.json", "is not JSON"),
        ("head -c 2000000 /dev/zero >reward.json", "is no file of at most"),
        ("mkfifo reward.json", "is no file of at most"),
        ("mkdir reward.json", "is no file of at most"),
        ("ln -s /etc/passwd reward.json", "cannot be read"),
    ],
)
def test_a_malformed_reward_is_named(make: str, says: str) -> None:
    outcome = ran(make)
    assert (outcome.status, outcome.exit_code, outcome.reward) == (S.INVALID_REWARD, 0, None)
    assert "reward.json" in outcome.error and says in outcome.error


def test_a_failure_has_no_reward() -> None:
    assert ran("""echo '{{"reward": 1}}' >reward.json; exit 1""").reward is None


def test_of_a_long_output_the_end_is_kept() -> None:
    outcome = ran("seq 1 30000; echo err >&2; echo out", limits=limits(tail_bytes=16))
    assert outcome.status == S.FINISHED and outcome.output == "9\n30000\nerr\nout\n"[-16:]
    assert ran("seq 1 3", limits=limits(tail_bytes=0)).output == ""


def test_a_flood_is_ended(tmp_path: Path) -> None:
    outcome = ran("yes", limits=limits(output_bytes=1_000_000))
    assert outcome.status == S.OUTPUT_LIMIT and "1000000 bytes" in outcome.error and outcome.output.endswith("y\n")


def test_the_output_limit_holds_to_the_byte_also_for_one_that_has_ended() -> None:
    assert ran("printf 12345", limits=limits(output_bytes=5)).status == S.FINISHED
    assert ran("printf 123456", limits=limits(output_bytes=5)).status == S.OUTPUT_LIMIT


def test_time_is_limited_and_what_was_said_is_kept() -> None:
    outcome = ran("echo begun; exec sleep 600", limits=limits(wall_s=2.0))
    assert (outcome.status, outcome.exit_code, outcome.output) == (S.TIMED_OUT, -15, "begun\n")
    assert 2.0 <= outcome.duration_s < 3.2 and outcome.error == "its 2 s are over"


def test_resource_limits_are_the_childs_own() -> None:
    names = ["CPU", "AS", "FSIZE", "NPROC", "NOFILE"]
    show = f"import resource as r; print([r.getrlimit(getattr(r, 'RLIMIT_' + n))[0] for n in {names}])"
    some = limits(cpu_s=7, address_space_bytes=1 << 30, file_bytes=4096, processes=5000, open_files=64)
    assert ran(python(show), limits=some).output == f"{[7, 1 << 30, 4096, 5000, 64]}\n"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 64


@pytest.mark.parametrize(
    ("code", "which", "says"),
    [
        ("while True: pass", {"cpu_s": 1}, "ended by signal SIGXCPU"),
        (
            "open('big', 'wb', 0).write(bytes(9000)); open('big', 'ab', 0).write(b'x')",
            {"file_bytes": 4096},
            "exit code 1",
        ),
        ("bytearray(1 << 29)", {"address_space_bytes": 1 << 28}, "exit code 1"),
        ("x = [open('task.json') for _ in range(99)]", {"open_files": 32}, "exit code 1"),
    ],
)
def test_resource_limits_bite(code: str, which: dict[str, int], says: str) -> None:
    outcome = ran(python(code), limits=limits(**which))
    assert outcome.status == S.FAILED and outcome.error == says


def test_signals_are_as_a_program_expects_them() -> None:
    shown = ran(["/bin/sh", "-c", "grep -E '^Sig(Blk|Ign)' /proc/self/status"]).output
    assert [line.split()[1] for line in shown.splitlines()] == ["0" * 16, "0" * 16]
