#!/usr/bin/env bash
# One session: Claude Code works on the repository in this folder; then its tests, which it has not seen, are run.
#   solve.sh ISSUE TESTS      claude is on PATH; ANTHROPIC_BASE_URL and the key are set for each session
set -u
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
SETTINGS="$(mktemp)"
sed "s|STOP_HOOK|$HERE/stop_hook.sh|" "$HERE/settings.json" >"$SETTINGS"

# An own system prompt and three tools: 9,000 tokens of a tokenizer with one for each byte instead of 49,000.
claude --print --permission-mode bypassPermissions --strict-mcp-config --settings "$SETTINGS" \
  --tools "Bash,Edit,Read" --system-prompt "You mend a repository. Its tests must pass." \
  -- "$1" </dev/null >"$TMPDIR/reply.txt" || echo "claude ended with exit code $?" >&2

exec python3 "$HERE/judge.py" "$2" "$TMPDIR/reply.txt"
