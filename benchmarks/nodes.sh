#!/bin/bash
# Runs nodes.py on network namespaces in the place of machines: one for each, joined by a bridge in one more, each with a
# disk of its own (a tmpfs at the same path in all). Needs root; nothing of it is left behind.
#
#     sudo PATH=$PATH benchmarks/nodes.sh 4
set -eu
nodes=$1
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
cleanup() {
    for ((node = 0; node < nodes; node++)); do ip netns del "minloop$node" 2>/dev/null || true; done
    ip netns del minloopbridge 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT
cleanup
mkdir -p "$work/disk"

ip netns add minloopbridge
ip -n minloopbridge link add bridge type bridge
ip -n minloopbridge link set bridge up
for ((node = 0; node < nodes; node++)); do
    ip netns add "minloop$node"
    ip -n "minloop$node" link set lo up
    ip link add mlveth netns "minloop$node" type veth peer name "port$node" netns minloopbridge
    ip -n minloopbridge link set "port$node" master bridge up
    ip -n "minloop$node" address add "10.77.0.$((node + 1))/24" dev mlveth
    ip -n "minloop$node" link set mlveth up
done
PYTHONPATH=$root python "$root/benchmarks/nodes.py" "$nodes" "$work"
