#!/bin/bash
# All that wants four GPUs of one machine, in order, each part also a command of its own; about 20 minutes in all:
#
#     TORCHTITAN=... benchmarks/four_gpus.sh
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=4
export UB_SKIPMC=1  # not every machine grants NVLink multicast, which tp_comm_overlap would use
failed=0
part() {
    SECONDS=0
    echo "== $*"
    "$@" || failed=1
    echo "== $SECONDS s"
}
part env NVIDIA_TF32_OVERRIDE=0 python benchmarks/resharded_training.py
part python benchmarks/sameness_gpu.py
part python benchmarks/scaling.py
part python benchmarks/compare_peers.py D gpus=4 global_batch_size=32 minloop torchtitan steps=8 warmup=3 repeats=1
# FSDP's copies and products would wait for each other in one queue
part env -u CUDA_DEVICE_MAX_CONNECTIONS python benchmarks/fsdp.py zero1_4 megatron_fsdp_4 hsdp_4 hsdp_4_outer_optimizer steps=10
exit $failed
