"""What a new user gets wrong: what was found, what was expected, what to type next; never a traceback, never a loss."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = "9" * 30
VITLAB = Path(sys.executable).parent / "vitlab"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("hello\n", encoding="utf-8")
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    return tmp_path


WRONG = {
    "weights that are not there": (["inspect", "mine.pth"], ["mine.pth: no such file or folder.", "bundled:digits"]),
    "a run that is not there": (["inspect", "runs/photos/best"], ["runs/photos/best: no such file or folder."]),
    "no name at all": (["inspect", ""], ["the checkpoint's name is empty", "shell variable"]),
    "a new name instead of a checkpoint": (["predict", "vit_base", "x.png"], ["vitlab train DATA model.name=vit_base"]),
    "a file where a folder must be": (
        ["convert", "bundled:digits", "text.txt/out"],
        ["Name another place"],
    ),
    "a way that is none": (["bench", "bundled:digits", "--ways", "fast"], ["unknown backend 'fast'", "use eager"]),
    "a rank by another name": (["train", "digits", "model.lora_rank=8"], ["no 'model.lora_rank'", "model.lora=8?"]),
    "positions stretched by less than 1": (
        ["train", "digits", "model.name=dinov3_digits", "model.position_jitter=0.5"],
        ["position_jitter=0.5 must be a factor of 1 (no change) or more."],
    ),
    "classes of a model that has words": (
        ["predict", "bundled:clip", "digits#3"],
        ["this model (clip) knows no classes by itself", "vitlab zeroshot CHECKPOINT IMAGE --labels"],
    ),
    "a layout that a CLIP is not uploaded in": (
        ["push", "bundled:clip", "me/x", "--to", "timm", "--dry-run"],
        ["a CLIP is not written as timm: use --to hf, open_clip or native", "vitlab convert --encoder"],
    ),
    "a reducer that is none": (["bench", "bundled:digits", "--reducer", "tom:r=2"], ["Did you mean 'tome'?"]),
    "a library that is none": (["bench", "bundled:digits", "--against", "tim"], ["Use transformers, onnxruntime."]),
    "changed, but not resumed": (["train", "digits", "--changed"], ["add --resume RUN, or leave it out"]),
    "no run to resume": (["train", "--resume", "empty"], ["holds no recipe.toml", "`vitlab runs` lists"]),
    "labels that are no text": (
        ["zeroshot", "bundled:clip", "x.png", "--labels", "bytes"],
        ["--labels bytes: is no text."],
    ),
    "a device that is none": (["predict", "bundled:digits", "digits#3", "--device", "tpu"], ["use auto, cpu, cuda"]),
    "a table of another kind": (["embed", "digits", "-o", "x.csv"], ["Parquet: name it x.parquet"]),
    "a table without a name": (["embed", "digits", "-o", "."], ["is a folder: name the table in it, out.parquet"]),
    "no run to look at": (["doctor", "empty"], ["it is not a run. `vitlab runs` lists"]),
    "a reducer to draw that is none": (
        ["explain", "pruned", "bundled:digits", "digits#3", "--reducer", "nope"],
        ["unknown reducer 'nope'.", "tome:r=13"],
    ),
    "an address of another machine": (
        ["serve", "bundled:digits", "--host", "192.0.2.1"],
        ["--host must be an address of this machine"],
    ),
    "a limit that is no number": (
        ["serve", "bundled:digits", "--max-upload-mb", "inf"],
        ["--max-upload-mb inf must be finite."],
    ),
    "images by the billion billion": (
        ["bench", "bundled:digits", "--batch", DIGITS],
        [f"--batch-size {DIGITS} must lie"],
    ),
    "classes beyond counting": (
        ["convert", "bundled:digits", "x", "--classes", DIGITS],
        [f"--classes {DIGITS} must lie"],
    ),
    "a seed below all": (["explain", "reconstruct", "bundled:mae", "x", "--seed", f"-{DIGITS}"], ["must lie within"]),
    "as many neighbours": (["explain", "features", "bundled:digits", "x", "-k", DIGITS], [f"--top {DIGITS} must lie"]),
    "threads without end": (["serve", "bundled:digits", "--threads", DIGITS], [f"--threads {DIGITS} must lie"]),
    "a side beyond counting": (["study", "scaling", "--sizes", f"64,{DIGITS}"], ["above 0 and below 2**31"]),
    "depth beyond counting": (["study", "scaling", "--models", f"vit_tiny:depth={DIGITS}"], ["not fit into 64 bits"]),
    "epochs beyond counting": (["train", "digits", f"run.epochs={DIGITS}"], ["not fit into 64 bits"]),
    "minutes without end": (["train", "digits", "--minutes", "1e400"], ["--minutes inf must be finite."]),
    "a class's number of 5000 digits": (
        ["explain", "relevance", "bundled:digits", "digits#3", "--target", "9" * 5000],
        ["is no class of this model"],
    ),
    "a model that is none": (["bench", "vit_bse"], ["there is no model named 'vit_bse'. Did you mean 'vit_base'"]),
}


@pytest.mark.parametrize(("args", "says"), WRONG.values(), ids=WRONG)
def test_a_clear_error(command, here, args, says):
    told = command(*args, code=2).stderr
    for part in says:
        assert part in told
    assert "Errno" not in told and "Traceback" not in told
    assert sorted(path.name for path in here.iterdir()) == ["bytes", "empty", "text.txt"]


def test_a_picture_without_a_name(command, here):
    assert "'': is empty, and no file's name." in command("predict", "bundled:digits", "", code=1).stderr


def test_a_place_that_may_not_be_written(command, here):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (here / "empty").chmod(0o555)
    told = command("convert", "bundled:digits", "empty/out", code=2).stderr
    assert "permission denied. Name another place" in told


def test_ctrl_c_is_told_in_one_line(command, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("vitlab.models.registry.list_models", interrupted)
    assert command("models", code=130).stderr == "vitlab: stopped.\n"


def test_output_that_nobody_reads_any_more(tmp_path):
    """vitlab models | head -1, with the list that needs no torch"""
    script = f"'{VITLAB}' models --hub | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, encoding="utf-8")
    assert done.stdout.startswith("name") and "Traceback" not in done.stderr and "Exception" not in done.stderr
