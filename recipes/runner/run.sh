#!/usr/bin/env bash
# Train the agent of recipes/openai_tool_agent by RUNNERS processes of their own, which ask this run for tasks.
# They run beside the training here; anywhere else the last function is all that a machine needs.
# Further arguments are hydra overrides.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
AGENT="$HERE/../openai_tool_agent"
VENV="$HERE/../../.venv/bin/python"
export PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export DATA="${DATA:-$PWD/runs/runner}"
FILE="$DATA/checkpoints/trajectories.sqlite.admin.json"

runners() { # waits for the run's address, then works until it is stopped
  until [ -f "$FILE" ]; do sleep 1; done
  exec "$PYTHON" -m seamless_verl.cli runner --admin-file "$FILE" --slots 16 --agent "calculator=$AGENT/agent.py:run"
}

rm -f "$FILE" # one that a killed run left names nobody
source "$HERE/../beside.sh"
for _ in $(seq "${RUNNERS:-2}"); do
  runners &
  pids+=($!)
done
run_beside "$AGENT/run.sh" "actor_rollout_ref.rollout.agent.agent_loop_config_path='$HERE/agents.yaml'" \
  actor_rollout_ref.rollout.agent.default_agent_loop=fleet "trainer.default_local_dir='\${oc.env:DATA}/checkpoints'" "$@"
