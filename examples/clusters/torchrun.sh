#!/usr/bin/env bash
# On each node: torchrun.sh NODES NODE_RANK ADDRESS_OF_THE_FIRST RUN_DIR [section.key=value ...]
# The run folder, and the folder that this is called in, must be the same on all nodes.
set -euo pipefail
nodes=$1 rank=$2 first=$3 run_dir=$4
shift 4
exec torchrun --nnodes="$nodes" --node-rank="$rank" --nproc-per-node=1 --master-addr="$first" \
    --master-port="${MASTER_PORT:-29500}" -m areal_core node "$run_dir" --config "${CONFIG:-run.yaml}" "$@"
