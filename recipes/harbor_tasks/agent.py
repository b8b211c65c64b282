"""A minimal agent of terminals: runs each reply of the model as a shell command, until one is empty, or `done`."""

from __future__ import annotations

import os
import subprocess
import sys

import openai

TURNS, SHOWN, COMMAND_S = int(os.environ.get("AGENT_TURNS", "4")), 400, 20


def main() -> None:
    client = openai.OpenAI(timeout=3600, max_retries=5)
    task = "Reply with one shell command, and nothing else. When the task is done, reply: done"
    messages = [{"role": "system", "content": task}, {"role": "user", "content": sys.argv[1]}]
    for _ in range(TURNS):
        reply = client.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content or ""
        if text.strip() in ("", "done"):
            break
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": output_of(text)}]


def output_of(command: str) -> str:
    try:
        done = subprocess.run(
            ["sh", "-c", command.replace("\0", "")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_S,
        )
    except subprocess.TimeoutExpired:
        return f"not done in {COMMAND_S} s"
    except (OSError, ValueError) as error:  # text of a model need not be a word of a command line
        return f"could not be run: {error}"
    return f"exit code {done.returncode}\n{done.stdout[-SHOWN:].decode(errors='replace')}"


if __name__ == "__main__":
    main()
