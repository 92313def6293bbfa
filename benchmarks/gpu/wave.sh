#!/usr/bin/env bash
# One lease of a GPU machine, in three parts that each fit ten minutes; every part leaves its results under $OUT as one archive.
#   wave.sh finish ROOT            environments from the pieces that unpack.py took
#   wave.sh checks GPUS OUT        recipes through the project's runtime and Dynamo, and the pair matrix, side by side: no figures from here
#   wave.sh sizes GPUS OUT         real shapes: transfer rates and the link's limit, with nothing else running
#   wave.sh load GPUS OUT          AIPerf on three deployments of the same GPUs, one after the other
set -euo pipefail
cd "$(dirname "$0")/../.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0 PYTHONUNBUFFERED=1
PATCHED=(--patched gpu-per-region=vllm-0.31.0-nixl-per-region-kv-heads)
if grep -q vllm-0.31.0-nixl-per-group-pages patches/series.yaml; then
  PATCHED+=(--patched "gpu-per-group=vllm-0.31.0-nixl-per-region-kv-heads,vllm-0.31.0-nixl-per-group-pages")
fi

free_gpus() { # GPU memory of ended engines goes back a moment after them
  for _ in $(seq 40); do
    [ -z "$(nvidia-smi --query-compute-apps=pid --format=csv,noheader)" ] && return 0
    sleep 0.5
  done
  nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader
}

pack_results() { # small files only: evidence, verdicts, tables; long logs are cut
  find "$1" -name '*.log' -size +400k -exec sh -c 'tail -c 400000 "$0" >"$0.tail" && mv "$0.tail" "$0"' {} \;
  tar -C "$1" --exclude='models' --exclude='inputs.json' --exclude='*.parquet' -czf "$1.tar.gz" .
}

part=$1
case $part in
finish)
  python3 benchmarks/gpu/unpack.py finish --root "$2" "${PATCHED[@]}"
  ;;
checks)
  gpus=$2 out=$3/checks
  mkdir -p "$out"
  chosen="gpu-tiny-p1d2-stock gpu-tiny-p1d2 gpu-tiny-p1d2-hybrid"
  if [ "$gpus" -ge 4 ]; then chosen+=" gpu-tiny-p2d4"; fi
  read -ra recipes <<<"${RECIPES:-$chosen}"
  python3 -m benchmarks.gpu.run_recipes --gpus "$gpus" --out "$out/recipes" --together --timeout-s 330 "${recipes[@]}" >"$out/recipes.txt" 2>&1 &
  runner=$!
  # Engines of a run look for foreign processes on their GPUs before they start: the matrix comes after that look.
  for _ in $(seq 90); do
    [ "$(find "$out/recipes/runs" -path '*/logs/*-0.log' ! -name '*wrapper*' 2>/dev/null | wc -l)" -ge $((2 * ${#recipes[@]})) ] && break
    sleep 0.5
  done
  all="stock/TRITON_ATTN/auto per-region/TRITON_ATTN/auto per-region/FLASH_ATTN/auto per-region/TRITON_ATTN/fp8"
  all+=" stock/TRITON_ATTN/auto/hybrid per-group/TRITON_ATTN/auto/hybrid per-group/FLASH_ATTN/auto/hybrid per-group/TRITON_ATTN/fp8/hybrid"
  read -ra variants <<<"${VARIANTS:-$all}"
  timeout 400 python3 -m benchmarks.gpu.run_matrix --gpus "$gpus" --out "$out/matrix" correctness --variants "${variants[@]}" \
    --prompts "${PROMPTS:-102}" --prompt-tokens 200 230 300 380 450 530 640 700 800 900 1024 1150 1300 1500 1700 --start-s 200 || echo "matrix: exit code $?"
  wait $runner || echo "recipes: exit code $?"
  cat "$out/recipes.txt"
  pack_results "$out"
  ;;
sizes)
  gpus=$2 out=$3/sizes
  mkdir -p "$out"
  free_gpus
  timeout 570 python3 -m benchmarks.gpu.run_matrix --gpus "$gpus" --out "$out/matrix" realsize --start-s 200 --repeats "${REPEATS:-8}" \
    --measure-s "${MEASURE_S:-340}" || echo "sizes: exit code $?"
  pack_results "$out"
  ;;
load)
  gpus=$2 out=$3/load
  mkdir -p "$out"
  chosen="gpu-26b-p2d4 gpu-26b-agg-tp4 gpu-26b-p2d2"
  if [ "$gpus" -lt 4 ]; then chosen="gpu-half-p1d2 gpu-half-agg-tp2 gpu-half-p1d1"; fi
  for recipe in ${RECIPES:-$chosen}; do
    free_gpus
    python3 -m benchmarks.gpu.run_recipes --gpus "$gpus" --out "$out" --timeout-s "${EACH_S:-260}" "$recipe" || echo "$recipe: exit code $?"
  done
  pack_results "$out"
  ;;
*)
  echo "unknown part $part" >&2
  exit 2
  ;;
esac
