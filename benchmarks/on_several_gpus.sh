#!/usr/bin/env bash
# What areal does on four or more GPUs of one host, part after part: half of them generate and half train, or all train.
#
#   benchmarks/on_several_gpus.sh FOLDER [PART...]
#
# Parts, in this order: asynchronous (against synchronous), elastic (servers join and leave; a server and a rank are
# killed), labels (is each token's weight version right?), scaling (of the train step), large (7B: weight sync apart and
# colocated, checkpoints beside training). A part that fails is told, and the others go on. FOLDER/PART.log has its table
# or its events; all of it takes four H100s about 25 minutes, and 150 GB of disk for `large`.
#
# PYTHON is a Python with areal and its plugins, PROGRAM what starts SGLang, by absolute paths; `python3` has both by
# default. Those that benchmarks/against_trl_on_gpus.sh made in THERE:
#   PYTHON=THERE/areal/bin/python PROGRAM="THERE/sglang/bin/python -m sglang.launch_server"
# TINY=1 tries all parts but large, and all rows but those in turns, without a GPU; PROGRAM is then
# "PYTHON tests/servers_on_cpu/sglang_cpu.py" with a Python of `make servers`.
set -euo pipefail
parts=(asynchronous elastic labels scaling large)
case ${1:--} in -*)
    sed -n '/^# /s/^# //p; /^set/q' "$0" >&2
    exit 2
    ;;
esac
folder=$(realpath -m -- "$1")
cd "$(dirname "$0")/.."
shift
for part in "$@"; do
    [[ $part =~ ^[a-z]+$ && " ${parts[*]} " == *" $part "* ]] || { echo "$part is no part: ${parts[*]}" >&2 && exit 2; }
    [ "$part${TINY:+,tiny}" != large,tiny ] || { echo "large needs GPUs: leave TINY out" >&2 && exit 2; }
done
python=${PYTHON:-python3}
"$python" -c "import areal_core, areal_fsdp, torch" || { echo "PYTHON ($python) has no areal with FSDP" >&2 && exit 2; }
program=(--program "${PROGRAM:-python3 -m sglang.launch_server}")
if [ -n "${TINY:-}" ]; then
    gpus=4 cpu=(--cpu) tiny=(--tiny) cuda=(--live 16 --updates 3)
    trial=(--cpu --size tiny --batch 4 --median 8 --concurrent 16 --peak-s 2 --steps 2 --warm-up 1 --rows peak,async-2,sync)
    [ $# -gt 0 ] || set -- asynchronous elastic labels scaling
else
    gpus=$({ nvidia-smi --list-gpus || true; } 2> /dev/null | wc -l) cpu=() trial=() tiny=() cuda=(--device cuda)
    [ $# -gt 0 ] || set -- "${parts[@]}"
fi
[ "$gpus" -ge 4 ] || { echo "four GPUs are needed; this host has $gpus" >&2 && exit 2; }
half=$((gpus / 2)) last=$((gpus - 1))
mkdir -p "$folder"
for part in "$@"; do
    [ ! -e "$folder/$part.log" ] || { echo "$folder has $part of an earlier call: name another folder" >&2 && exit 2; }
done

asynchronous() {
    "$python" benchmarks/asynchronous.py "${program[@]}" --size 1.5b --servers "$half" --trainers "$half" \
        --batch $((32 * gpus)) --rows peak,async-2,sync,async-1,async-4,turns-sync --steps 5 \
        --output "$folder/asynchronous.json" --folder "$folder/asynchronous" "${trial[@]}"
}
elastic() { "$python" benchmarks/gpu_elastic.py "${program[@]}" "${cpu[@]}" --folder "$folder/elastic"; }
labels() { "$python" benchmarks/labels.py --engine sglang "${program[@]}" "${cuda[@]}"; }
scaling() {
    local ranks plan=(1:gradient,h100,h100-one,moe,moe-eager 2:gradient,h100,h100-one@context2,h100-one@tensor2)
    for ((ranks = 4; ranks <= gpus; ranks *= 2)); do
        plan+=("$ranks:gradient,h100,7b,7b@tensor2,7b@context2,h100-one@context4,moe,moe-eager,moe@expert$ranks")
    done
    "$python" benchmarks/gpu_scaling.py "${tiny[@]}" "${plan[@]}" --limit-s 600 \
        --output "$folder/scaling.json" --folder "$folder/scaling"
}
large() {
    local all generate train failed=0 model=$folder/7b words=(--learning-rate 1e-6 --steps 8 --set
        train_engine.optimizer_state_dtype=bfloat16 checkpoint.keep=1)
    all=$(seq -s , 0 "$last") generate=$(seq -s , 0 $((half - 1))) train=$(seq -s , "$half" "$last")
    "$python" benchmarks/gpu_runs.py model "$model" --size 7b || return 1
    "$python" benchmarks/gpu_runs.py disaggregated --model "$model" "${program[@]}" --run-dir "$folder/apart/run" \
        "${words[@]}" "placement={generation: [$generate], training: [$train]}" checkpoint.every=3 || failed=1
    "$python" benchmarks/gpu_runs.py colocated --model "$model" "${program[@]}" --run-dir "$folder/colocated/run" \
        "${words[@]}" "placement={generation: [$all], training: [$all]}" checkpoint.every_s=0 || failed=1
    return "$failed"
}

failed=0
for part in "$@"; do
    echo "== $part; log: $folder/$part.log"
    "$part" 2>&1 | tee "$folder/$part.log" || { failed=1 && echo "$part failed" >&2; }
done
exit "$failed"
