#!/bin/sh
# A completion with a budget of its own, and what it got, by curl.
#
#     vllm serve path/to/model --kv-policy h2o --h2o-budget 512
#     sh examples/curl.sh http://localhost:8000 64
set -eu
server=$1
budget=$2
model=$(curl -sf "$server/v1/models" | sed 's/.*"data":\[{"id":"\([^"]*\)".*/\1/')
curl -s --fail-with-body "$server/v1/completions" -H 'Content-Type: application/json' -d '{
  "model": "'"$model"'",
  "prompt": "Once upon a time there was",
  "max_tokens": 128,
  "ignore_eos": true,
  "vllm_xargs": {"h2o_budget": '"$budget"', "h2o_report": true}
}'
