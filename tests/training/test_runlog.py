"""The log of a run: strict JSON, whole after a kill, without doubled steps after a resume; wandb and TensorBoard."""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlab.training.runlog import LOG, RunLog, from_json, read_log, to_json


def strict(text: str | bytes):
    """JSON as every other language reads it: NaN and Infinity are no numbers there."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def without_time(lines: list[dict]) -> list[dict]:
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def test_what_is_written_reads_back(tmp_path):
    with RunLog(tmp_path) as log:
        log.write("train", 1, loss=torch.tensor(0.5), lr=np.float32(0.25), n=np.int64(3), flags=(True, None))
        log.write("train", 2, loss=math.nan, high=math.inf, low=[-math.inf, {"deep": torch.tensor([1.0, math.nan])}])
        log.write("note", 2, text='图 "quoted"\nsecond line', path=Path("a/b"), odd="\udcff.png")
    raw = (tmp_path / LOG).read_bytes().splitlines()
    lines = [strict(line) for line in raw]
    assert [list(line)[:3] for line in lines] == [["kind", "step", "time"]] * 3
    assert lines[1]["loss"] == "NaN" and lines[1]["high"] == "Infinity"
    first, second, third = read_log(tmp_path)
    assert without_time([first]) == [
        {"kind": "train", "step": 1, "loss": 0.5, "lr": 0.25, "n": 3, "flags": [True, None]}
    ]
    assert math.isnan(second["loss"]) and second["high"] == math.inf and second["low"][0] == -math.inf
    assert second["low"][1]["deep"][0] == 1.0 and math.isnan(second["low"][1]["deep"][1])
    assert third["text"] == '图 "quoted"\nsecond line' and third["path"] == "a/b" and third["odd"] == "\udcff.png"
    assert first["time"] <= second["time"] <= third["time"]


def test_results_as_strict_json():
    value = {"top1": np.float64(0.25), "loss": math.nan, "classes": ["猫"], "params": 3}
    assert strict(to_json(value))["loss"] == "NaN"
    back = from_json(to_json(value))
    assert math.isnan(back.pop("loss")) and back == {"top1": 0.25, "classes": ["猫"], "params": 3}


def test_a_killed_process_leaves_every_line_and_imports_nothing_it_does_not_need(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from vitlab.training.runlog import RunLog
log = RunLog(Path(sys.argv[1]))
for step in range(1, 51):
    log.write("train", step, loss=1 / step)
print(sorted(sys.modules.keys() & {"torch", "wandb", "tensorboard", "matplotlib"}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.strip() == "[]"
    assert [line["loss"] for line in read_log(tmp_path)] == [1 / step for step in range(1, 51)]


def test_a_last_line_cut_anywhere_is_left_out_and_mended_on_resume(tmp_path):
    with RunLog(tmp_path) as log:
        log.write("train", 1, loss=0.5, name="图")
        log.write("train", 2, loss=0.25, name="图")
    path = tmp_path / LOG
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for cut in range(second, len(whole)):
        path.write_bytes(whole[:cut])
        complete = cut == len(whole) - 1  # only the line end is missing
        assert len(read_log(tmp_path)) == 1 + complete
        with RunLog(tmp_path, start_step=1) as log:
            log.write("train", 2, loss=0.125)
        assert [line["loss"] for line in read_log(tmp_path)] == [0.5, 0.125]


def test_no_log_is_an_empty_log(tmp_path):
    assert read_log(tmp_path) == []


def test_damage_in_the_middle_is_named_and_a_resume_mends_it(tmp_path):
    with RunLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write("train", step, loss=0.5)
    lines = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    for damage in (b"\0\0\0\n", b"[1, 2]\n", b'{"kind": "train"}\n'):
        (tmp_path / LOG).write_bytes(lines[0] + damage + lines[2])
        with pytest.raises(ValueError, match=r"log\.jsonl: line 2 .*--resume"):
            read_log(tmp_path)
    RunLog(tmp_path, start_step=3).close()
    assert [line["step"] for line in read_log(tmp_path)] == [1, 3]


def work(log: RunLog, first: int, last: int, evaluate_before_save: bool, saves: list[tuple[int, int]]) -> None:
    """What a loop does: a line a step, an evaluation and a save every ten, in either order."""
    if first == 0:
        log.write("start", 0, steps=40)
        log.write("val", 0, top1=0.1)
    elif first % 10 == 0 and not evaluate_before_save:
        log.write("val", first, top1=first / 100)  # the save may have been the last thing that happened
    for step in range(first + 1, last + 1):
        log.write("train", step, loss=1 / step)
        if step % 7 == 0:
            log.write("skip", step, message=f"{step}.png")
        if step % 10 == 0:
            for act in ("val", "save") if evaluate_before_save else ("save", "val"):
                if act == "save":
                    saves.append((step, log.path.stat().st_size))
                else:
                    log.write("val", step, top1=step / 100)


@pytest.mark.parametrize("evaluate_before_save", [True, False])
def test_a_resumed_log_equals_that_of_a_run_never_stopped(tmp_path, evaluate_before_save):
    with RunLog(tmp_path / "whole") as log:
        work(log, 0, 40, evaluate_before_save, [])
    expected = without_time(read_log(tmp_path / "whole"))
    rng = random.Random(0)
    for trial in range(10):
        folder, saves = tmp_path / f"{trial}", [(0, 0)]
        for _ in range(3):  # killed three times, in the middle of any line after the save
            step, _ = saves[-1]
            with RunLog(folder, start_step=step) as log:
                work(log, step, rng.randint(step, 39), evaluate_before_save, saves)
            data = (folder / LOG).read_bytes()
            if saves[-1][0] > step or step == 0:  # else what was there at the save may have moved
                (folder / LOG).write_bytes(data[: rng.randint(saves[-1][1], len(data))])
        step, _ = saves[-1]
        with RunLog(folder, start_step=step) as log:
            work(log, step, 40, evaluate_before_save, saves)
        assert without_time(read_log(folder)) == expected


def test_notes_are_never_taken_for_repetitions(tmp_path):
    for text in ("first", "second"):
        with RunLog(tmp_path, start_step=5) as log:
            log.write("note", 5, text=text)
    assert [line["text"] for line in read_log(tmp_path)] == ["first", "second"]


def test_going_back_is_all_or_nothing(tmp_path, monkeypatch):
    with RunLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write("train", step, loss=0.5)
    before = (tmp_path / LOG).read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            RunLog(tmp_path, start_step=1)
    assert (tmp_path / LOG).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [LOG]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file_and_what_to_do(tmp_path):
    with RunLog(tmp_path) as log, Path("/dev/full").open("wb", buffering=0) as full:
        log._file, opened = full, log._file
        with pytest.raises(OSError, match=r"No space left.*vitlab train --resume.*log\.jsonl"):
            log.write("train", 1, loss=0.5)
        opened.close()


def test_an_unknown_way_of_tracking(tmp_path):
    with pytest.raises(ValueError, match="off, offline, online"):
        RunLog(tmp_path, wandb="onlin")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "options", "remedy"),
    [
        ("wandb", {"wandb": "offline"}, r"pip install 'vitlab\[track\]'. Or set track.wandb=off"),
        ("tensorboard", {"tensorboard": True}, r"pip install 'vitlab\[track\]'. Or set track.tensorboard=false"),
    ],
)
def test_a_missing_package_is_an_error_with_a_remedy(tmp_path, monkeypatch, module, options, remedy):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ValueError, match=remedy):
        RunLog(tmp_path, **options)


def wandb_records(path: Path) -> list:
    """The records of an offline run's file, which is a LevelDB log: blocks of 32 KiB, a header of 7 bytes a piece."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-not-found]

    data, at, records, pieces = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        pieces += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            records.append(Record.FromString(pieces))
            pieces = b""
    return records


def test_wandb_offline_writes_into_the_run_folder_and_calls_nobody(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        folder = tmp_path / "运行"
        code = """
import sys
from pathlib import Path
from vitlab.training.runlog import RunLog
folder = Path(sys.argv[1])
with RunLog(folder, wandb="offline", config={"optim": {"lr": 0.125}}, name="my run") as log:
    log.write("train", 1, loss=0.5)
    log.write("train", 2, loss=float("nan"))
    log.write("note", 2, text="words stay in the log")
with RunLog(folder, wandb="offline", config={"optim": {"lr": 0.125}}, name="my run", start_step=1) as log:
    log.write("val", 2, top1=0.75)
"""
        # A process of its own, so that wandb's settings of this one do not matter.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
        environment |= {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "" and "wandb" not in done.stderr
        with pytest.raises(TimeoutError):
            server.accept()
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    files = [next(run.glob("*.wandb")) for run in runs]
    assert 1 <= len(files) <= 2  # two starts within one second share a folder
    records = [record for file in files for record in wandb_records(file)]
    configs = [item for r in records if r.HasField("run") for item in r.run.config.update]
    assert {c.key or "/".join(c.nested_key): json.loads(c.value_json) for c in configs}["optim"] == {"lr": 0.125}
    assert {r.run.display_name for r in records if r.HasField("run")} == {"my run"}
    assert len({r.run.run_id for r in records if r.HasField("run")}) == 1  # resumed, it is the same run
    written = []
    for record in records:
        if record.HasField("history"):
            item = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            written.append({k: v for k, v in item.items() if not k.startswith("_")} | {"step": item["_step"]})
    if len(files) == 2:
        assert {"train/loss": "0.5", "step": "1"} in written
        assert any(item.get("train/loss") in ("NaN", '"NaN"') for item in written)
    assert {"val/top1": "0.75", "step": "2"} in written
    assert not any("text" in key for item in written for key in item)


def test_tensorboard_reads_the_curves_and_forgets_what_a_killed_run_wrote_too_much(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, tensorboard=True)
    for step in (1, 2, 3, 4):
        log.write("train", step, loss=step / 2, text="words are no curve")
    log.close()
    with RunLog(tmp_path, tensorboard=True, start_step=2) as log:
        log.write("train", 3, loss=-3.0)
        log.write("val", 3, top1=0.75)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/loss", "val/top1"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0), (3, -3.0)]
    assert [(e.step, e.value) for e in events.Scalars("val/top1")] == [(3, 0.75)]
