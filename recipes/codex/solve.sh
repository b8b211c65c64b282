#!/usr/bin/env bash
# One session: Codex works on the repository in this folder; failing tests go back to it once; then its tests, which it
# has not seen, are run.
#   solve.sh ISSUE TESTS      codex is on PATH; OPENAI_BASE_URL and the key are set for each session
set -u
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export CODEX_HOME="$HOME/.codex"
mkdir "$CODEX_HOME"
cp "$HERE/codex.toml" "$CODEX_HOME/config.toml"
cp "$HERE/instructions.md" "$CODEX_HOME/"

ask() { # further arguments of `codex exec`; the last message is put into reply.txt
  codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
    -c "model_providers.seamless.base_url=\"$OPENAI_BASE_URL\"" \
    -c "model_instructions_file=\"$CODEX_HOME/instructions.md\"" \
    -o "$TMPDIR/reply.txt" "$@" </dev/null || echo "codex ended with exit code $?" >&2
}

touch "$TMPDIR/reply.txt"
ask -- "$1"
python3 -m unittest -q 2>"$TMPDIR/failures.txt" || ask resume --last "$(tail -c 600 "$TMPDIR/failures.txt")"

exec python3 "$HERE/../claude_code/judge.py" "$2" "$TMPDIR/reply.txt"
