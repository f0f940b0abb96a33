#!/bin/bash
# The reward is 1 for the right number. `exists` becomes a metric.
exists=0 right=0
if [ -f /app/words.txt ]; then
    exists=1
    [ "$(tr -d '[:space:]' < /app/words.txt)" = "$(cat /tests/words)" ] && right=1
fi
echo "{\"reward\": $right, \"exists\": $exists}" > /logs/verifier/reward.json
