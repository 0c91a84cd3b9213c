"""Every command on every page is read by the program itself: its options, and whatever the verb would read next.

Of `vitlab train` that is the recipe with all keys and values, and the model as training would build it: from the run
that the page made before, where it says so. Nothing is run here; what pages also run is in the tests of single pages.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser
from typer.main import get_command

import vitlab
from vitlab.checkpoints import bundled
from vitlab.checkpoints.convert import TARGETS
from vitlab.checkpoints.load import is_checkpoint
from vitlab.cli.main import app
from vitlab.images.datasets import SOURCES
from vitlab.models.registry import MODELS, build_config, find
from vitlab.reduce.parse import reducer_of
from vitlab.study.families import SMALL
from vitlab.study.grid import read_grid
from vitlab.study.model_spec import parse_models, parse_numbers
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.finetune import build_model
from vitlab.training.job import suited_recipe
from vitlab.training.ladder_plan import ladder_or_scratch
from vitlab.training.objectives import objective_class
from vitlab.training.presets import find_recipe, split_arguments
from vitlab.training.recipe import Recipe, with_settings

ROOT = Path(__file__).parents[2]
PROGRAM: Any = get_command(app)
OTHERS = ("cp", "curl", "docker", "export", "find", "kubectl", "make", "npm", "pip", "python", "source")
TABLES = {
    "scans.csv": "path,label,patient\n1.jpg,a,1\n",
    "tags.csv": "image,labels\n1.jpg,cat;dog\n",
    "prices.csv": "image,price\n1.jpg,2.5\n",
}
FOLDERS = ("photos", "labelled", "FOLDER", "lab1", "lab2", "scans", "nuclei")  # of pictures, that a reader has
FILES = ("photos/files.txt",)
SUPPOSED = {  # runs that a page supposes beside runs/mine
    "clip": {"clip", "dino"},
    "deit": {"resnet50"},
    "look_inside": {"digits", "swin"},
    "serve": {"cats"},
    "training": {"first"},
}


def commands(page: Path) -> list[list[str]]:
    """The words of every line in a block of bash, and behind $ in one of console; digits#3 is a word, # a remark."""
    found: list[str] = []
    fences = re.findall(r"^```(bash|console)[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    for fence, block in fences:
        lines = block.replace("\\\n", " ").splitlines()
        found += [x.removeprefix("$ ") for x in lines if x and (fence == "bash" or x.startswith("$ "))]
    return [shlex.split(re.sub(r"\s+# .*|\$\([^)]*\)", "", line)) for line in found]


PAGES = [
    p
    for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if commands(p) and ROOT / "docs" / "zh" not in p.parents
]
ENGLISH = [page for page in PAGES if ROOT / "docs" / "en" in page.parents]


class Reader:
    """Reads the commands of one page in their order."""

    def __init__(self, page: Path, scratch: Path):
        self.page, self.scratch = page, scratch
        self.runs: dict[str, Recipe | None] = {f"runs/{x}": None for x in ("mine", *SUPPOSED.get(page.stem, ()))}

    def read(self, words: list[str]) -> None:
        processes = 1
        if "|" in words:
            self.read(words[words.index("|") + 1 :])
            words = words[: words.index("|")]
        words = words[next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]
        if words[0] == "torchrun":
            started = get_args_parser().parse_args(words[1:])
            processes = int(started.nnodes.split(":")[-1]) * int(started.nproc_per_node)
            words = words[words.index("-m") + 1 :]
        if words[0] in OTHERS:
            if words[0] in ("cp", "python"):
                assert (ROOT / words[1]).is_file()
            return
        assert words[0] == "vitlab"
        verb, asked = self.parse(words[1:])
        {"train": self.train, "study": self.study}.get(verb[0], self.other)(verb, asked, processes)
        for word in words:
            for run in re.findall(r"(?<![\w/])runs/[\w.-]+", word):
                assert run in self.runs, f"{run}: no command above makes it"
            for name in re.findall(r"bundled:(\w+)", word):
                assert name in bundled.names()

    def parse(self, args: list[str]) -> tuple[list[str], dict[str, Any]]:
        """(verb, or verb and its verb; what the program would hand on)"""
        command, verb = PROGRAM, []
        while hasattr(command, "commands"):
            name, *args = args
            verb, command = [*verb, name], command.commands[name]
        return verb, command.make_context(verb[-1], list(args)).params

    def train(self, verb: list[str], asked: dict[str, Any], processes: int) -> None:
        what, settings = asked["what"], list(asked["settings"] or [])
        if what is not None and "=" in what:
            what, settings = None, [what, *settings]
        if what is not None:
            what, settings = split_arguments(what, settings)
        if asked["resume"] is not None or asked["minutes"] is not None:
            with_settings(Recipe(), settings)
            if asked["minutes"] is not None:
                self.runs[f"runs/{Path(what or 'digits').name}"] = None
            return
        name, before = find_recipe(what)
        recipe = suited_recipe(ladder_or_scratch(with_settings(before, settings), settings))
        self.build(recipe)
        if name.startswith("imagenet"):  # the paper's batch, however many share it
            assert images_per_step(recipe) * processes == images_per_step(before)
        self.runs[recipe.run.dir or f"runs/{name}"] = recipe

    def build(self, recipe: Recipe) -> None:
        """The model as training would build it, on no device unless it starts from weights."""
        method = objective_class(recipe.objective.name)
        method.check(recipe)
        start = {
            key: self.weights(source, recipe.objective.name if key == "init_from" else "")
            for key in ("init_from", "init_image")
            if (source := getattr(recipe.model, key)) is not None
        }
        words = None  # a CLIP to start from has its own
        if "init_from" not in start:
            words = Tokenizer.train(["a dog"], vocab=recipe.text.vocab, context=recipe.text.context)
        classes = [str(number) for number in range(1 if method.learns == "number" else 10)]
        with nullcontext() if start else torch.device("meta"):
            model, _ = build_model(replace(recipe, model=replace(recipe.model, **start)), classes, 3, words)
        method.check_model(recipe, model)

    def weights(self, source: str, objective: str) -> str:
        """A checkpoint of the package; one like that of a run of this page; for any other a small ViT or CLIP."""
        if source.startswith(bundled.PREFIX):
            return source
        if objective == "clip":
            return "bundled:clip"
        made = self.runs.get(source.removesuffix("/best"))
        name, options = (made.model.name, made.model.options) if made else ("vit_cifar", dict(classes=7, depth=3))
        folder = self.scratch / re.sub(r"\W", "-", source)
        if not folder.exists():
            vitlab.save(vitlab.create(name, **options), folder)
        return str(folder)

    def study(self, verb: list[str], asked: dict[str, Any], _: int) -> None:
        settings = list(asked.get("settings") or [])
        if verb[1] == "configs":
            grid = read_grid(find_recipe(asked["what"])[1], [s for s in settings if not s.startswith("run.seed=")])
            for cell in grid.cells:
                self.build(cell.recipe)
        elif verb[1] in ("scaling", "data-efficiency"):
            for name, options in parse_models(asked["models"]).values():
                small, usual = SMALL.get(name, (name, {}))
                build_config(small, **{**usual, **options})
            with_settings(Recipe(), [re.sub(r"^\w+:", "", setting) for setting in settings])
            for option, kind in (("sizes", int), ("fractions", float)):
                if asked.get(option):
                    parse_numbers(option, asked[option], kind)
        elif verb[1] == "ssl":
            with_settings(Recipe(), [*(asked["pretrain"] or []), *(asked["few"] or [])])
        self.other(verb, asked, 1)

    def other(self, verb: list[str], asked: dict[str, Any], _: int) -> None:
        if verb[0] in ("data", "verify-resume"):
            with_settings(find_recipe(asked["what"])[1], list(asked["settings"] or []))
        if verb[0] in ("inspect", "bench") and asked["what"] != "CHECKPOINT" and not is_checkpoint(asked["what"]):
            find(asked["what"])
        if verb[0] == "models" and asked["pattern"]:
            assert [name for name in MODELS if fnmatch(name, asked["pattern"])]
        if verb[0] == "convert":
            assert asked["to"] in TARGETS
        source = asked.get("data") or asked.get("source")
        if source and verb[0] != "convert":
            assert source in SOURCES or Path(source).exists() or source.endswith(".tar"), source
        for text in several(asked.get("reducer")) + several(asked.get("way")):
            reducer_of(text)


def images_per_step(recipe: Recipe) -> int:
    return recipe.data.batch_size * recipe.optim.accumulate


def several(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    for name in FILES:
        (tmp_path / name).touch()
    for name, text in TABLES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_understood(page, here):
    reader = Reader(page, here)
    for words in commands(page):
        try:
            reader.read(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{shlex.join(words)}: {error!r}") from error


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_both_languages_have_the_same_commands(page):
    assert commands(page) == commands(ROOT / "docs" / "zh" / page.relative_to(ROOT / "docs" / "en"))


@pytest.mark.parametrize(
    "command",
    [
        "vitlab train cifar10_30min model.init_from=runs/dino/best",  # the encoder has a class token
        "vitlab train cifar10 model.init_from=runs/mae/best",  # which no command made
        "vitlab train cifar10 optim.rate=1",
        "vitlab train cifar10 model.name=vit_ciphar",
        "vitlab train cifar_10",
        "vitlab train --for 10",
        "vitlab explain attentions bundled:cifar10 cat.jpg",
        "vitlab predict bundled:cifar cat.jpg",
        "vitlab inspect vit_bas",
        "vitlab eval runs/dino/best cifar",
        "vitlab study tokens runs/dino/best cifar10 --way tome:s=8",
        "vitlab train cifar10 model.reducer=evit:r=8 model.class_token=false model.pooling=mean",  # EViT asks it
        "torchrun --nproc-per-node 8 -m vitlab train imagenet_vit_b16",  # eight times the paper's step
    ],
)
def test_a_wrong_command_is_noticed(command, here):
    reader = Reader(Path("page.md"), here)
    reader.read(shlex.split("vitlab train dino_cifar10 run.dir=runs/dino"))
    with pytest.raises((Exception, SystemExit)):
        reader.read(shlex.split(command))
