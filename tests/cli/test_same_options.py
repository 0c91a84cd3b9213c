"""One habit for the command line: an option means the same, and is spelled and explained the same, in all commands."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.main import get_command

from vitlab.advice import on_the_command_line, to_type
from vitlab.cli.main import app
from vitlab.cli.options import SIZE, old_spellings

ROOT = Path(__file__).parents[2]
PROGRAM: Any = get_command(app)


def commands(group: Any = PROGRAM, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield path + name, command


OPTIONS: dict[str, dict[str, Any]] = defaultdict(dict)  # --json: command -> the option
for path, command in commands():
    for parameter in command.params:
        for spelling in parameter.opts if parameter.param_type_name == "option" else ():
            OPTIONS[spelling][path] = parameter
SAME = {  # spellings, what stands for the value, help; the help of --image-size may go on
    "--json": (["--json"], None, "Print the result as JSON."),
    "--html": (["--html"], "FILE", "Also write a page for a browser: .html."),
    "--batch-size": (["--batch-size", "--batch"], None, "Images per batch."),
    "--image-size": (["--image-size"], "HxW", SIZE),
    "--device": (["--device"], "auto|cpu|cuda|mps", "Device to run the model on."),
}
WITHOUT_RESULT = {"serve"}


@pytest.mark.parametrize("name", SAME)
def test_an_option_is_the_same_everywhere(name):
    spellings, metavar, help = SAME[name]
    assert len(OPTIONS[name]) > 1
    for path, option in OPTIONS[name].items():
        assert option.opts == spellings and option.metavar == metavar, path
        assert option.help == help or (name == "--image-size" and option.help.startswith(help)), path
        assert option.is_flag == (name == "--json"), path


@pytest.mark.parametrize("path", OPTIONS["--device"])
def test_a_device_that_is_not_there_is_refused_by_every_command(path, command, tmp_path, monkeypatch):
    """Before anything is computed, in the words of the function that they share."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.png")
    image, model = "digits#3", "bundled:digits"
    of_command = {
        "try": ["sample:cat", "--no-serve"],
        "predict": [model, image],
        "zeroshot": ["bundled:clip", image, "--labels", "cat,dog"],
        "export": [model, "-o", "m.onnx", "--data", "digits"],
        "bench": [model],
        "diff": [model, model],
        "check": ["photos", "--model", "bundled:cifar10"],
        "eval": [model, "digits"],
        "index": ["photos", "-o", "ix", "--model", model],
        "embed": ["photos", "-o", "t.parquet", "--model", model],
        "explain patch": [model, image, "digits#4"],
        "serve": [model],
    }
    told = command(*path.split(), *of_command.get(path, [model, image]), "--device", "cuda", code=2).stderr
    assert "device cuda, but torch sees no CUDA device here: use auto or cpu." in told


def test_device_and_batch_size_are_in_every_command_that_runs_a_model_on_images():
    explain = {path for path, _ in commands() if path.startswith("explain ")}
    assert {"predict", "zeroshot", "eval", "index", "embed", *explain} <= set(OPTIONS["--batch-size"])
    wanted = {"predict", "zeroshot", "eval", "index", "embed", "check", "diff", "try", "bench", "export", "serve"}
    assert set(OPTIONS["--device"]) == wanted | explain


@pytest.mark.parametrize(("words", "says"), [(["check"], "--{} {}"), (["train"], "data.{}={}")])
def test_a_message_names_what_its_own_command_takes(words, says, command, tmp_path):
    """check has options for what train reads from a recipe."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    table = tmp_path / "prices.csv"
    for header, cells, named in (
        ("price", "2.5", [("target", "price")]),
        ("rooms", "3", [("target", "rooms"), ("label", "rooms")]),
        ("kind", "cat", [("label", "kind")]),
        ("big", "1", [("labels", "big")]),
        ("label,labels", "cat,dog;cat", [("label", "label"), ("labels", "labels")]),
    ):
        table.write_text(f"image,{header}\na.png,{cells}\n", encoding="utf-8")
        told = command(*words, table, code=2).stderr
        assert all(says.format(*column) in told for column in named), told
        assert ("data." in told) == ("data." in says) and ("--" in told) == ("--" in says)
    column = says.format("target", "size")
    told = command(*words, table, *column.split(), code=2).stderr
    assert f"{column} names a column that is not there. Columns: image, label, labels" in told


def test_o_is_where_the_result_goes():
    for path, option in OPTIONS["-o"].items():
        assert option.opts[:2] == ["-o", "--out"] and option.metavar in ("FILE", "FOLDER", "INDEX"), path
    assert OPTIONS["--out"].keys() == OPTIONS["-o"].keys()


def test_every_command_with_a_result_has_json():
    assert {path for path, _ in commands()} - set(OPTIONS["--json"]) == WITHOUT_RESULT


def test_old_spellings_are_valid():
    assert {"study scaling", "study configs"} <= set(OPTIONS["--dir"])
    assert {"bench", "inspect"} <= set(OPTIONS["--batch"])
    assert "runs" in OPTIONS["--plot"] and "data" in OPTIONS["--preview"] and "predict" in OPTIONS["--csv"]
    words = ["explain", "rollout", "m", "x.png", "--html", "-o", "a.png"]
    assert old_spellings(words) == ["explain", "rollout", "m", "x.png", "--html=-", "-o", "a.png"]
    assert old_spellings(["explain", "rollout", "--html"]) == ["explain", "rollout", "--html=-"]
    for unchanged in ([], ["explain", "rollout", "--html", "b.html", "m"], ["search", "ix", "--html", "found"]):
        assert old_spellings(unchanged) == unchanged


def test_html_names_the_page(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command("explain", "rollout", "bundled:digits", "digits#3", "-o", "a.png", "--html", "pages/b.html")
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")} == {"a.png", "a.npz", "pages/b.html"}
    command("explain", "rollout", "bundled:digits", "digits#3", "-o", "c.png", "--html")
    assert Path("c.html").read_text(encoding="utf-8") == Path("pages/b.html").read_text(encoding="utf-8")
    told = command("explain", "rollout", "bundled:digits", "digits#3", "--html=b.txt", code=2).stderr
    assert "--html b.txt: name an .html file" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["train", "digits", "--epochs", "3"],
            "option: --epochs. Values of the recipe have no dashes: run.epochs=3",
        ),
        (["train", "digits", "--batchsize", "3"], "No such option: --batchsize"),
        (["train", "digits", "depth=3"], "there is no 'depth' in a recipe. Did you mean model.depth=3?"),
        (["train", "digits", "epochs=3"], "there is no 'epochs' in a recipe. Did you mean run.epochs=3?"),
        (["study", "configs", "digits", "lr=0.1,0.2"], "there is no 'lr' in a recipe. Did you mean optim.lr=0.1?"),
        (["data", "digits", "--val-fraction", "0.2"], "Values of the recipe have no dashes: data.val_fraction=0.2"),
    ],
)
def test_a_value_of_the_recipe_is_named_in_full(words, says, command):
    assert says in command(*words, code=2).stderr


def test_commands_name_no_python_functions():
    """In messages of errors: what only Python has is an argument of to_type, or refuses what only Python can pass."""
    python_only = ("the model is loaded already", "expected a model of vitlab")
    named = []
    for file in (ROOT / "src" / "vitlab").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for raised in (node for node in ast.walk(tree) if isinstance(node, ast.Raise)):
            if "AttributeError" in ast.unparse(raised):
                continue
            calls = [n for n in ast.walk(raised) if isinstance(n, ast.Call) and ast.unparse(n.func) == "to_type"]
            alone = {id(part) for call in calls for part in ast.walk(call.args[0])}
            for part in ast.walk(raised):
                text = part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else ""
                if id(part) not in alone and re.search(r"\bvitlab\.[a-z_]+", text):
                    named += [f"{file.name}: {text}"] if not any(words in text for words in python_only) else []
    assert not named, named
    with on_the_command_line():
        assert to_type("vitlab.load(path, heads=3)", "--heads 3") == "--heads 3"
    assert to_type("vitlab.load(path, heads=3)", "--heads 3") == "vitlab.load(path, heads=3)"
