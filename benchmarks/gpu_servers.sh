#!/usr/bin/env bash
# What a version of SGLang or vLLM does under areal on GPUs: contract tests, every transport of weights, weight
# versions, sleep, and a server that is killed.
#
#   benchmarks/gpu_servers.sh sglang|vllm FOLDER [PART...]
#
# conformance    the suite for inference engines, in float32
# labels         each token's weight version, against a forward pass
# broadcast, memory, disk    six steps of the demonstration; one GPU generates, one trains
# ipc            SGLang alone: one GPU does both in turns, and the server reads the trainer's GPU memory
# asleep         one GPU does both in turns, weights through a folder
# kept           one GPU does both, the server keeps its memory
# killed         the server gets SIGKILL, and the run continues with another
# graphs         SGLang alone, and only if named: seconds of a start and of prefills by the prefill graphs that are
#                captured, with cold and with warm caches; MODEL is the folder of a model
# weights        only if named: seconds to write the weights of a sync from a GPU to memory, by several ways
#
# Each part is one line of FOLDER/results.jsonl, and FOLDER/PART.log has its output. After a failure the next part
# starts; the exit code is the number of failures. PYTHON is a Python with areal, its plugins and the server, such as the
# one of gpu_host_kit.sh. GPUS="0 1" names the GPU that generates and the one that trains.
set -uo pipefail
engine=${1:-} folder=$(realpath -m -- "${2:-.}")
[ $# -ge 2 ] || engine=
case $engine in sglang | vllm) ;; *) sed -n '/^# /s/^# //p; /^set/q' "$0" >&2 && exit 2 ;; esac
shift 2
cd "$(dirname "$0")/.." || exit 2
read -r generates trains <<< "${GPUS:-0 1}"
python=${PYTHON:-python3} failed=0 config=benchmarks/gpu_servers_$engine.yaml
mkdir -p "$folder"
if [ "$engine" = sglang ]; then
    parts=(conformance labels broadcast memory disk ipc asleep kept killed) shares=memory_saver
    program="$python -m sglang.launch_server"
    options='{"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "mem_fraction_static": 0.4, "context_length": 4096, "max_total_tokens": 131072, "max_running_requests": 256,
        "cuda_graph_max_bs_decode": 256, "cuda_graph_backend_prefill": "disabled",
        "enable_deterministic_inference": true}'
    kept=()
else
    parts=(conformance labels broadcast memory disk asleep kept killed) shares=sleep_mode
    program="$python -m vllm.entrypoints.openai.api_server"
    options='{"max_model_len": 4096, "max_num_seqs": 256, "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 4000000000}'
    kept=(inference_engine.options.kv_cache_memory_bytes=4000000000)
fi
[ $# -gt 0 ] || set -- "${parts[@]}"
apart="placement={generation: [$generates], training: [$trains]}"
one="placement={generation: [$generates], training: [$generates]}"

demonstration() { # PART KEY=VALUE...
    local run=$folder/$1-run
    shift
    timeout 300 "$python" -m areal_core run "$config" steps=6 evaluation=null "run_dir=$run" "$@" &&
        "$python" -m areal_core audit "$run"
}
part() {
    case $1 in
    conformance)
        CUDA_VISIBLE_DEVICES=$generates AREAL_SERVERS_ON_GPU=1 timeout 420 "$python" -m pytest -p no:cacheprovider \
            -rA --durations=8 "plugins/areal_$engine/tests/test_conformance.py"
        ;;
    labels)
        CUDA_VISIBLE_DEVICES=$generates TRITON_F32_DEFAULT=ieee NVIDIA_TF32_OVERRIDE=0 VLLM_USE_FLASHINFER_SAMPLER=0 \
            timeout 240 "$python" benchmarks/labels.py --engine "$engine" --program "$program" --options "$options" \
            --device cuda --live 128 --updates 10
        ;;
    broadcast | memory | disk) demonstration "$1" "$apart" "weight_sync.transport=$1" ;;
    ipc) demonstration ipc "$one" "inference_engine.$shares=true" weight_sync.transport=ipc ;;
    asleep) demonstration asleep "$one" "inference_engine.$shares=true" weight_sync.transport=memory ;;
    kept) demonstration kept "$one" weight_sync.transport=memory "${kept[@]}" ;;
    killed)
        timeout 400 "$python" benchmarks/faults.py table "$config" "$apart" evaluation=null \
            inference_engine.health_timeout_s=5 --victims server-0
        ;;
    graphs)
        CUDA_VISIBLE_DEVICES=$generates timeout 900 "$python" benchmarks/prefill_graphs.py "${MODEL:?}" \
            --program "$program" --options '{"attention_backend": "triton", "sampling_backend": "pytorch",
            "grammar_backend": "none", "mem_fraction_static": 0.5, "max_running_requests": 512}'
        ;;
    weights) CUDA_VISIBLE_DEVICES=$trains timeout 300 "$python" benchmarks/weights_file.py --device cuda ;;
    *) echo "$1 is no part: ${parts[*]}" >&2 && return 2 ;;
    esac
}
for name in "$@"; do
    began=$SECONDS
    part "$name" > "$folder/$name.log" 2>&1
    code=$?
    [ $code = 0 ] || failed=$((failed + 1))
    "$python" benchmarks/gpu_servers_line.py "$name" $code $((SECONDS - began)) "$folder" |
        tee -a "$folder/results.jsonl"
done
exit $failed
