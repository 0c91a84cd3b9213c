"""Training over three hosts without a shared disk, which are killed and come back: equal to the bit to one host.

    sudo python benchmarks/hosts.py [--kills 5] [--steps 40] [--keep FOLDER]

The hosts are network namespaces of this machine (ip netns, veth pairs on a bridge), each with a folder of its own as
its disk; torchrun's c10d rendezvous joins one process of each. While the run goes on, all processes of a host are
killed, by turns of the second, the third and the first one. A host that is not the first comes back with an empty disk:
the others wait for it and go on from the first host's last save. Without the first host there is nowhere to meet: the
others end, and all start again with the same command. At last the weights are compared, to the bit, with those of three
processes on one host that nobody killed. Making namespaces takes root's rights; without them nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import cycle
from pathlib import Path

import torch
from measure import machine, print_table
from safetensors.torch import load_file

HOSTS, BRIDGE, PORT = 3, "vitlab-br", 29511
PATIENCE = 900.0  # seconds in which a step must come
RECIPE = ["digits", "run.dir=run", "run.device=cpu", "run.save_every=1", "data.batch_size=32", "model.depth=2"]


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


def namespace(host: int) -> str:
    return f"vitlab-h{host}"


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def make_network(undo: ExitStack) -> None:
    """A bridge, and a namespace for each host with a cable to it; all is removed at the end."""
    ip("link", "add", BRIDGE, "type", "bridge")
    undo.callback(ip, "link", "del", BRIDGE, check=False)
    ip("link", "set", BRIDGE, "up")
    for host in range(HOSTS):
        name, inside, outside = namespace(host), f"vl{host}", f"vlbr{host}"
        ip("netns", "add", name)
        undo.callback(ip, "netns", "del", name, check=False)
        undo.callback(kill_host, host)
        ip("link", "add", inside, "type", "veth", "peer", "name", outside)
        ip("link", "set", inside, "netns", name)
        ip("link", "set", outside, "master", BRIDGE, "up")
        ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", inside)
        ip("-n", name, "link", "set", inside, "up")
        ip("-n", name, "link", "set", "lo", "up")


def kill_host(host: int) -> None:
    """Every process in its namespace, at once; those of no other."""
    found = subprocess.run(["ip", "netns", "pids", namespace(host)], capture_output=True, encoding="utf-8", check=False)
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def torchrun(options: Sequence[str], settings: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*command, "-m", "vitlab", "train", *RECIPE, *settings, "--rejoin"]


def start_host(host: int, disk: Path, settings: Sequence[str]) -> subprocess.Popen[bytes]:
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{PORT}", "--rdzv-id=vitlab"]
    meeting.append(f"--rdzv-conf=is_host={int(host == 0)}")  # an address inside a namespace is no name's address
    restarts = ["--max-restarts=100", f"--local-addr={address(host)}"]  # ranks follow the addresses: the first is 0
    command = torchrun([f"--nnodes={HOSTS}", "--nproc-per-node=1", *meeting, *restarts], settings)
    disk.mkdir(exist_ok=True)
    log = (disk / "log.txt").open("ab")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"vl{host}", "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else torchrun tells a host that comes back no address
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace(host), *command], cwd=disk, env=environment, stdout=log, stderr=log
    )


def step_of(disk: Path) -> int:
    """The step of the last save; 0 before there is one."""
    with suppress(OSError, ValueError, KeyError):  # it is being replaced
        return int(json.loads((disk / "run" / "last" / "state.json").read_text(encoding="utf-8"))["step"])
    return 0


def wait_for_step(disk: Path, step: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + PATIENCE
    while step_of(disk) < step:
        if time.monotonic() > until:
            raise SystemExit(f"step {step} did not come in {PATIENCE:.0f} s: see {disk / 'log.txt'} (--keep).")
        if all(process.poll() is not None for process in processes):
            raise SystemExit(f"all hosts have ended before step {step}: see {disk / 'log.txt'} (--keep).")
        time.sleep(0.2)


def broken_run(folder: Path, settings: Sequence[str], kills: int, steps: int) -> list[list[str]]:
    """Rows about the kills; the run is then complete on the first host's disk."""
    disks = [folder / f"host{host}" for host in range(HOSTS)]
    running = [start_host(host, disks[host], settings) for host in range(HOSTS)]
    rows = []
    for number, victim in zip(range(kills), cycle((1, 2, 0)), strict=False):
        wait_for_step(disks[0], (number + 1) * steps // (kills + 1), running)
        began = time.monotonic()
        kill_host(victim)
        running[victim].wait()
        before = step_of(disks[0])
        if victim == 0:
            for host in range(1, HOSTS):
                kill_host(host)
                running[host].wait()
        else:
            shutil.rmtree(disks[victim])  # it comes back with an empty disk
        for host in range(HOSTS):
            if running[host].poll() is not None:
                running[host] = start_host(host, disks[host], settings)
        wait_for_step(disks[0], before + 1, running)
        rows.append([f"{number + 1}", f"host {victim + 1}", str(before), f"{time.monotonic() - began:.0f} s"])
    for process in running:
        if process.wait(PATIENCE) != 0:
            raise SystemExit(f"a host ended with {process.returncode}: see {folder} (--keep).")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of the run, about")
    parser.add_argument("--keep", type=Path, help="keep disks and logs in this folder, which must not exist")
    args = parser.parse_args()
    try:
        ip("netns", "add", "vitlab-probe")
        ip("netns", "del", "vitlab-probe")
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"network namespaces are not allowed here ({error}): run as root, with iproute2.") from None
    print(machine())
    per_epoch = 1_078 // (32 * HOSTS)  # steps; digits has 1,078 training images
    settings = [f"run.epochs={max(1, round(args.steps / per_epoch))}"]
    with ExitStack() as undo:
        folder = args.keep or Path(undo.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=args.keep is None)
        make_network(undo)
        one = folder / "one"
        one.mkdir()
        subprocess.run(
            torchrun([f"--nproc-per-node={HOSTS}"], settings), cwd=one, check=True, stdout=subprocess.DEVNULL
        )
        rows = broken_run(folder, settings, args.kills, args.steps)
        whole, broken = (load_file(folder / host / "run" / "last" / "weights.safetensors") for host in ("one", "host0"))
        equal = whole.keys() == broken.keys() and all(torch.equal(broken[key], whole[key]) for key in whole)
        alone = not any((folder / f"host{host}" / "run").exists() for host in range(1, HOSTS))
    print(f"\n{HOSTS} hosts, {args.kills} of them killed:\n")
    print_table(["kill", "of", "last save at step", "until the next save"], rows)
    print(f"\nweights equal to those of {HOSTS} processes on one host, to the bit: {'yes' if equal else 'NO'}")
    print(f"a run folder on the first host only: {'yes' if alone else 'NO'}")
    raise SystemExit(0 if equal and alone else 1)


if __name__ == "__main__":
    main()
