"""`python -m seamless_verl.config` prints the folder of our configs, for verl's `--config-dir`.

With `--settings` it prints docs/settings.md, with `--yaml` seamless.yaml: both are made of the schema.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING

from seamless_verl.agents.settings import CallableSettings, CommandSettings, RunnerSettings
from seamless_verl.config.composing import HERE
from seamless_verl.config.schema import NODE, SeamlessConfig
from seamless_verl.runtime.fields import SettingRow, rows

HEADER = "| key | type | default | allowed | meaning |\n|---|---|---|---|---|"
SEAMLESS = """# Settings

This page is made by `python -m seamless_verl.config --settings > docs/settings.md`; a test keeps it current.

## The `seamless:` node

Settings of the `seamless` trainer, beside those of verl: on the command line as `key=value`, or in a config of your
own. A run with wrong ones is refused before it starts, with each mistake that was found, its reason and a way out;
`python -m seamless_verl.check key=value ...` refuses the same and starts nothing.
"""
LOOPS = """
## Agent loops

Entries of the YAML file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names. Each has a `name`, which
`default_agent_loop` or a row of the data refers to, and a `_target_`. Below are the settings of the loops that run
agents against the gateway; a run with wrong ones is refused before it starts, too.

```yaml
- name: calculator
  _target_: seamless_verl.agent_loops.loops.CallableAgentLoop
  agent: path/to/agent.py:run
  time_limit_s: 60
- name: shell
  _target_: seamless_verl.agent_loops.loops.CommandAgentLoop
  command: [python, agent.py]
  session: {max_turns: 20, max_tokens: 8192, max_concurrent: 4}
  sampling: {min_p: 0.02, seed: 7}
  limits: {cpu_s: 30, file_bytes: 10485760}
- name: fleet
  _target_: seamless_verl.agent_loops.loops.RunnerAgentLoop
  agent: coder
  time_limit_s: 1800
```
"""
RUNNERS = """
A RunnerAgentLoop takes the keys of every loop, and these:
"""
BOOLEANS = ("off", "on", "no", "yes")  # to yaml, where they have no quotes
YAML = """\
# The settings of the `seamless:` node, with their defaults: made by `python -m seamless_verl.config --yaml` from
# seamless_verl/config/schema.py, which refuses anything else. docs/settings.md has a table of them.
"""
RUNNER_KEYS = (".agent", ".lease_s", ".claim_s", ".max_attempts")


def settings_page() -> str:
    """The page, as Markdown."""
    entry = {row.key: row for kind in (RunnerSettings, CallableSettings, CommandSettings) for row in rows(kind, "")}
    del entry[".name"], entry[".limits.wall_s"]  # the second is time_limit_s
    loops = sorted(
        entry.values(), key=lambda row: row.key.startswith((".command", ".folder", ".env", ".keep_failed", ".limits"))
    )
    runner = [row for row in rows(RunnerSettings, "") if row.key in RUNNER_KEYS]
    loops = [row for row in loops if row.key not in RUNNER_KEYS or row.key == ".agent"]
    return f"{SEAMLESS}\n{_table(rows(SeamlessConfig, NODE))}{LOOPS}\n{_table(loops)}{RUNNERS}\n{_table(runner)}"


def settings_yaml() -> str:
    """The file of defaults, as hydra reads it: a comment above each setting."""
    lines, open_nodes = [YAML], list[str]()
    for row in rows(SeamlessConfig, NODE):
        *nodes, name = row.key.split(".")[1:]
        for depth, node in enumerate(nodes):
            if open_nodes[: depth + 1] != nodes[: depth + 1]:
                lines.append(f"{'  ' * depth}{node}:\n")
        open_nodes, indent = nodes, "  " * len(nodes)
        allowed = f" One of {row.allowed.replace('`', '')}." if row.allowed.startswith("`") else ""
        lines += textwrap.wrap(
            row.meaning + allowed, 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        default = _default(row.default).strip("`")
        lines.append(f"{indent}{name}: {default if default not in BOOLEANS else json.dumps(default)}\n")
    return "\n".join(lines)


def _table(settings: Iterable[SettingRow]) -> str:
    return "\n".join((HEADER, *map(_line, settings))) + "\n"


def _line(row: SettingRow) -> str:
    cells = (f"`{row.key.lstrip('.')}`", row.type, _default(row.default), row.allowed, row.meaning)
    return f"| {' | '.join(cells)} |"


def _default(value: object) -> str:
    return "none" if value is MISSING else f"`{json.dumps(value).strip(chr(34))}`"


def main() -> None:
    """Print the folder, the page or the file of defaults."""
    parser = argparse.ArgumentParser(prog="python -m seamless_verl.config", description="Print the folder of configs.")
    parser.add_argument("--settings", action="store_true", help="print the table of settings, as Markdown, instead")
    parser.add_argument("--yaml", action="store_true", help="print the settings with their defaults instead")
    args = parser.parse_args()
    sys.stdout.write(settings_page() if args.settings else settings_yaml() if args.yaml else f"{HERE}\n")


if __name__ == "__main__":
    main()
