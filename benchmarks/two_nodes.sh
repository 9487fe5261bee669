#!/bin/bash
# Do two machines train as one does?  Needs root: two network namespaces stand for two machines, joined by a veth pair;
# each has its own cache and temporary directories, and torchrun's rendezvous goes over the pair. Prints "equal" if every
# logged number of a step is that of two ranks on one machine.
#
#     sudo PATH=$PATH benchmarks/two_nodes.sh
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
iterations=20
cleanup() {
    for node in 0 1; do ip netns del "minloop$node" 2>/dev/null || true; done
    rm -rf "$work"
}
trap cleanup EXIT

for node in 0 1; do
    ip netns add "minloop$node"
    ip -n "minloop$node" link set lo up
done
ip link add mlveth0 netns minloop0 type veth peer name mlveth1 netns minloop1
for node in 0 1; do
    ip -n "minloop$node" address add "10.77.0.$((node + 1))/24" dev "mlveth$node"
    ip -n "minloop$node" link set "mlveth$node" up
done

script="import sys; sys.path.insert(0, '$root/examples'); import long_run
long_run.main(train_iters=$iterations, num_files=40, save_interval=10, eval_interval=10, directory=sys.argv[1])"

# node PREFIX DIRECTORY ARGUMENTS...: torchrun with caches of its own
node() {
    local name=$1 directory=$2
    shift 2
    mkdir -p "$work/$name"
    env PYTHONPATH="$root" OMP_NUM_THREADS=1 HOME="$work/$name" TMPDIR="$work/$name" XDG_CACHE_HOME="$work/$name/cache" \
        TORCHINDUCTOR_CACHE_DIR="$work/$name/inductor" TRITON_CACHE_DIR="$work/$name/triton" \
        python -m torch.distributed.run "$@" --no-python python -c "$script" "$directory" >"$work/$name/output" 2>&1
}

rendezvous="--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29500 --rdzv-id=two"
export -f node
export root work script
pids=()
# The checkpoint directory is the one thing that nodes share. Both have one host name, so is_host says who waits.
for number in 0 1; do
    ip netns exec "minloop$number" env GLOO_SOCKET_IFNAME="mlveth$number" \
        bash -c "node node$number '$work/two' $rendezvous --rdzv-conf=is_host=$((1 - number)) --local-addr=10.77.0.$((number + 1))" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || { cat "$work"/node?/output; exit 1; }; done
node one "$work/one" --standalone --nproc-per-node=2 || { cat "$work/one/output"; exit 1; }

python - "$work" <<'EOF'
import json, sys
from pathlib import Path

def records(name):
    lines = Path(sys.argv[1], name, "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("time", "iteration-time")} for line in lines]

one, two = records("one"), records("two")
assert len(one) == len(two) == 22, (len(one), len(two))
assert one == two, next((a, b) for a, b in zip(one, two) if a != b)
print(f"equal: {len(two)} records, the last loss {two[-2]['lm loss']}")
EOF
