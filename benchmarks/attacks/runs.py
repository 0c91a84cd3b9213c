"""Run folders under attack: two writers, damaged files, and SIGKILLs at random moments over all objectives."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from vitlab.training.presets import find_recipe
from vitlab.training.recipe import Recipe, with_settings

Row = tuple[str, int, int]  # attack, tried, held
WRITERS = 20
KILLS = 8  # of each objective
TINY = (
    *("data.batch_size=32", "data.per_class=32", "model.width=32", "model.heads=2", "model.depth=2"),
    *("run.epochs=6", "run.save_every=3", "run.eval_every=3", "run.device=cpu"),
)
DIGITS = (*TINY, "augment.mixup=0.5", "optim.ema=0.9", "data.workers=2")
CLIP = (
    *("model.image.width=32", "model.image.depth=1", "model.text.width=32", "model.text.depth=1", "model.embed_dim=16"),
    *("data.batch_size=32", "data.per_class=32", "run.epochs=6", "run.save_every=3", "run.eval_every=3"),
    "run.device=cpu",
)
OBJECTIVES = {
    "digits, Mixup, EMA, 2 workers": ("digits", DIGITS),
    "mae": ("mae_digits", TINY),
    "dino": ("dino_digits", (*TINY, "objective.local_views=2", "objective.local_size=4")),
    "clip": ("clip_digits", CLIP),
}
FILES = ("weights.safetensors", "optimizer.safetensors", "ema.safetensors", "model.json", "state.json")


def run() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="vitlab-attack-") as name:
        folder = Path(name)
        rows = [two_writers(folder), two_resumes(folder), damage(folder)]
        rows += [kills(folder, objective) for objective in OBJECTIVES]
        return [*rows, kills_of_two_processes(folder)]


# --------------------------------------------------------------------------------------------------------- two writers


def two_writers(folder: Path) -> Row:
    """Two runs with different seeds into one folder, started up to a second apart."""
    draw, held = random.Random(0), 0
    for attempt in range(WRITERS):
        run = folder / f"writers{attempt}"
        commands = [["digits", *TINY, f"run.dir={run}", f"run.seed={seed}"] for seed in (1, 2)]
        held += _one_wins(run, commands, draw)
    return "two writers into one folder", WRITERS, held


def two_resumes(folder: Path) -> Row:
    """Two processes that resume the same stopped run."""
    draw, held = random.Random(1), 0
    stopped = folder / "stopped"
    _stop_at(with_settings(find_recipe("digits")[1], list(TINY)), stopped, step=4)
    for attempt in range(WRITERS):
        run = folder / f"resumes{attempt}"
        shutil.copytree(stopped, run)
        held += _one_wins(run, [["--resume", str(run)]] * 2, draw)
    return "two resumes of one run", WRITERS, held


def _one_wins(run: Path, commands: list[list[str]], draw: random.Random) -> bool:
    """Exactly one ends well, the other is told which process that was, and what the folder says is consistent."""
    started = []
    for command in commands:
        started.append(_vitlab("train", *command))
        time.sleep(draw.random() * (command is commands[0]))
    messages = [process.communicate()[1] for process in started]
    codes = [process.returncode for process in started]
    if sorted(codes) != [0, 2]:
        print(f"exit codes {codes}: {messages}", file=sys.stderr)
        return False
    winner, loser = codes.index(0), codes.index(2)
    told = f"is being written by process {started[winner].pid} " in messages[loser]
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    consistent = f"seed = {result['seed']}\n" in (run / "recipe.toml").read_text(encoding="utf-8")
    whole = _vitlab("doctor", str(run), "--json").communicate()[0]
    damaged = [row for row in json.loads(whole) if row["ok"] is False and "damaged" in row["says"]]
    if not (told and consistent and not damaged):
        print(f"told {told}, consistent {consistent}, damaged {damaged}: {messages[loser]}", file=sys.stderr)
    return told and consistent and not damaged


def _vitlab(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vitlab", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, encoding="utf-8"
    )


# -------------------------------------------------------------------------------------------------------------- damage


def _rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _edit(**values: object) -> Callable[[Path], object]:
    return _rewrite(lambda data: json.dumps({**json.loads(data), **values}).encode())


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncate": _rewrite(lambda data: data[: len(data) // 2]),
    "empty": _rewrite(lambda data: b""),
    "delete": Path.unlink,
    "flip one bit": _rewrite(lambda d: d[: len(d) // 3] + bytes([d[len(d) // 3] ^ 1]) + d[len(d) // 3 + 1 :]),
    "zeros from the middle": _rewrite(lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2)),
}
EDITS = [
    *(_edit(step=value) for value in (-5, 0, 7, 10**9, True, "6", None, [6])),
    *(_edit(best_epoch=3), _edit(finished=True), _edit(skipped=[]), _edit(seconds=-1.0), _edit(digests={})),
]


def damage(folder: Path) -> Row:
    """A stopped run, damaged in every way, then resumed: it must end as the unbroken run, or be refused in words."""
    recipe = with_settings(find_recipe("digits")[1], [*TINY, "optim.ema=0.9"])
    _in_child(lambda: _fit(recipe, folder / "whole"))
    _stop_at(recipe, folder / "broken", step=8)
    cases = [(name, change) for name in FILES for change in DAMAGES.values()]
    cases += [("state.json", change) for change in EDITS]
    held = 0
    for number, (name, change) in enumerate(cases):
        run = folder / f"damaged{number}"
        shutil.copytree(folder / "broken", run)
        change(run / "last" / name)
        code = _in_child(lambda run=run: _fit(recipe, run, resume=True))
        good = code == 2 or (code == 0 and same_end(folder / "whole", run))
        if not good:
            print(f"damage {number} of {name}: exit code {code}", file=sys.stderr)
        held += good
        shutil.rmtree(run)
    return "damaged file or edited state of a stopped run, resumed", len(cases), held


# --------------------------------------------------------------------------------------------------------------- kills


def kills(folder: Path, objective: str) -> Row:
    """SIGKILL at random moments; in the end weights and result must be those of a run that nobody stopped."""
    name, settings = OBJECTIVES[objective]
    recipe, straight, killed = _named(name, settings), folder / f"{name}-straight", folder / f"{name}-killed"
    began = time.perf_counter()
    _in_child(lambda: _fit(recipe, straight))
    length, draw, done = time.perf_counter() - began, random.Random(name), 0
    while done < KILLS:
        resume = (killed / "recipe.toml").exists()
        child = os.fork()
        if child == 0:
            _leave(lambda resume=resume: _fit(recipe, killed, resume=resume))
        time.sleep(length * draw.uniform(0.1, 0.4))
        os.kill(child, signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended == -signal.SIGKILL:
            done += 1
        else:  # it came to its end before: once more from the start
            if ended or not same_end(straight, killed):
                return f"SIGKILL: {objective}", KILLS, 0
            shutil.rmtree(killed)
    _in_child(lambda: _fit(recipe, killed, resume=(killed / "recipe.toml").exists()))
    return f"SIGKILL: {objective}", KILLS, KILLS * same_end(straight, killed)


def kills_of_two_processes(folder: Path) -> Row:
    """The same with torchrun: all its processes are killed at once."""
    straight, killed, kills = folder / "two-straight", folder / "two-killed", KILLS // 2
    settings = ("digits", *TINY, "optim.ema=0.9", "data.batch_size=16")
    began = time.perf_counter()
    _torchrun(*settings, f"run.dir={straight}").wait()
    length, draw, done = time.perf_counter() - began, random.Random(2), 0
    while done < kills:
        resume = (killed / "recipe.toml").exists()
        process = _torchrun(*(("--resume", str(killed)) if resume else (*settings, f"run.dir={killed}")))
        try:
            process.wait(length * draw.uniform(0.5, 0.95))
        except subprocess.TimeoutExpired:
            _kill_session(process.pid)
            done += 1
        process.wait()
        if process.returncode == 0:
            if not same_end(straight, killed):
                return "SIGKILL: two processes", kills, 0
            shutil.rmtree(killed)
    resume = (killed / "recipe.toml").exists()
    _torchrun(*(("--resume", str(killed)) if resume else (*settings, f"run.dir={killed}"))).wait()
    return "SIGKILL: two processes", kills, kills * same_end(straight, killed)


def _torchrun(*arguments: str) -> subprocess.Popen[bytes]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "vitlab", "train", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, start_new_session=True, env=environment, **quiet)  # type: ignore[call-overload]


def _kill_session(leader: int) -> None:
    """torchrun gives its workers sessions of their own, so a kill of the group does not reach them."""
    for process in [*_descendants(leader), leader]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _descendants(parent: int) -> Iterator[int]:
    listed = subprocess.run(
        ["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False, encoding="utf-8"
    ).stdout
    for child in map(int, listed.split()):
        yield from _descendants(child)
        yield child


# -------------------------------------------------------------------------------------------------------------- shared


def same_end(straight: Path, other: Path) -> bool:
    """Weights, optimiser, average and result of two finished runs are equal, to the bit; times aside."""
    from vitlab.training.verify import differences, resumable_state

    times = {"seconds", "images_per_second"}
    results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in (straight, other)]
    kept = [{key: value for key, value in result.items() if key not in times} for result in results]
    best = [(run / "best" / "weights.safetensors").read_bytes() for run in (straight, other)]
    return (
        kept[0] == kept[1] and best[0] == best[1] and not differences(resumable_state(straight), resumable_state(other))
    )


def _named(name: str, settings: tuple[str, ...]) -> Recipe:
    return with_settings(find_recipe(name)[1], list(settings))


def _fit(recipe: Recipe, run: Path, resume: bool = False) -> None:
    import torch

    from vitlab.training.loop import fit

    torch.set_num_threads(1)
    fit(recipe, run, resume=resume)


def _stop_at(recipe: Recipe, run: Path, step: int) -> None:
    """A run that was killed after this step."""

    def work() -> None:
        import torch

        from vitlab.training.loop import Silent, fit

        class KillAt(Silent):
            def step(self, done: int, numbers: dict[str, float]) -> None:
                if done == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        torch.set_num_threads(1)
        fit(recipe, run, show=KillAt())

    assert _in_child(work) == -signal.SIGKILL


def _in_child(work: Callable[[], object]) -> int:
    """In a fork, so that this process never computes; the exit code: 2 for a refusal in words, 1 for any other."""
    child = os.fork()
    if child == 0:
        _leave(work)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _leave(work: Callable[[], object]) -> None:
    code = 1
    try:
        work()
        code = 0
    except (ValueError, OSError) as error:
        code = 2 if str(error).count("\n") < 3 else 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


if __name__ == "__main__":
    for row in run():
        print(*row, sep=", ")
