"""Network namespaces in the place of machines, as nodes.sh makes them: each has a disk of its own and a torchrun."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.long_run_kills import ROOT, START, LongRun, wait_until

PORT = 29500


class Node:
    """A machine: a namespace with an agent of torchrun, and the agent's ranks."""

    def __init__(self, number: int, work: Path) -> None:
        self.number, self.disk = number, work / "disk"
        self.agent: subprocess.Popen[bytes] | None = None
        self.output = work / f"output{number}"

    def start(self, script: str, nnodes: str, run: str, *, max_restarts: int = 0, host: int = 0) -> None:
        """Start torchrun; machine `host` serves the rendezvous of `run`."""
        mine = {"HOME": "", "TMPDIR": "", "XDG_CACHE_HOME": "cache", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        environment = os.environ | {name: str(self.disk / folder) for name, folder in mine.items()}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "mlveth"}
        # torch 2.11's agents otherwise keep the address of the first rank of their first meeting for all later ones
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}", "--nproc-per-node=1"]
        launcher += [f"--max-restarts={max_restarts}", f"--rdzv-id={run}", "--rdzv-backend=c10d"]
        # All namespaces have one host name, so is_host says who serves the rendezvous.
        launcher += [f"--rdzv-endpoint=10.77.0.{host + 1}:{PORT}", f"--local-addr=10.77.0.{self.number + 1}"]
        launcher += [f"--rdzv-conf=is_host={int(self.number == host)},last_call_timeout=5", "--no-python"]
        # `ip netns exec` gives it mounts of its own, too
        inside = ["ip", "netns", "exec", f"minloop{self.number}", "sh", "-c", 'mount -t tmpfs disk "$0" && exec "$@"']
        with self.output.open("wb") as output:
            self.agent = subprocess.Popen(
                [*inside, str(self.disk), *launcher, sys.executable, "-c", script],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def ranks(self) -> list[psutil.Process]:
        if self.agent is None or self.agent.poll() is not None:
            return []
        try:
            return psutil.Process(self.agent.pid).children()
        except psutil.NoSuchProcess:
            return []

    def kill(self, *, cut_cable: bool = False) -> None:
        assert self.agent is not None
        if cut_cable:
            self.cable("down")
        for process in [*self.ranks(), self.agent]:
            process.kill()
        self.agent.wait()

    def said(self, phrase: str) -> list[str]:
        return [line.strip() for line in self.output.read_text(errors="replace").splitlines() if phrase in line]

    def cable(self, state: str) -> None:
        subprocess.run(["ip", "-n", "minloopbridge", "link", "set", f"port{self.number}", state], check=True)


class Run(LongRun):
    """examples/long_run.py on several machines; the ranks of `LongRun` are those of all of them."""

    def __init__(self, name: str, nodes: list[Node], work: Path, *, fewest: int = 0, host: int = 0, **options: Any):
        super().__init__(work / name, ranks=len(nodes), **options)
        self.name, self.nodes, self.host = name, nodes, host
        self.is_elastic, self.nnodes = fewest > 0, f"{fewest or len(nodes)}:{len(nodes)}"

    def begin(self, nodes: list[Node]) -> None:
        script = START.format(examples=str(ROOT / "examples"), options=self.options)
        restarts = 10 if self.is_elastic else 0
        for node in nodes:
            node.start(script, self.nnodes, self.name, max_restarts=restarts, host=self.host)

    def only(self, nodes: list[Node]) -> None:
        """Of which machines the ranks count from now on."""
        self.nodes, self.ranks = nodes, len(nodes)

    def alive(self) -> list[psutil.Process]:
        return [rank for node in self.nodes for rank in node.ranks()]

    def at(self, iteration: int) -> bool:
        if any(node.agent and node.agent.poll() is not None for node in self.nodes):
            raise RuntimeError("\n".join(node.output.read_text() for node in self.nodes))
        records = self.records()
        return bool(records) and records[-1]["iteration"] >= iteration

    def copy_once_gone(self, ranks: list[psutil.Process], copy: Path) -> None:
        """What the next ranks find, who need seconds to come to it."""
        wait_until(lambda: not any(rank.is_running() and rank.status() != "zombie" for rank in ranks))
        shutil.copytree(self.folder, copy, dirs_exist_ok=True)

    def exit_codes(self, patience: float = 300) -> list[int]:
        return [node.agent.wait(patience) for node in self.nodes if node.agent]
