"""Tab in bash, zsh and fish: commands, options and values, asked as the shell asks, without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitlab.cli import complete
from vitlab.models.registry import MODELS

VITLAB = Path(sys.executable).parent / "vitlab"


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Where the names of models are kept: not in the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def ask(capsys, monkeypatch):
    """What the shell would offer behind these words; the last of them is being typed."""

    def offered(shell: str, *words: str) -> list[str]:
        monkeypatch.setenv("_VITLAB_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("vitlab", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(("vitlab", *words)))
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        from vitlab.cli.main import run

        with pytest.raises(SystemExit) as stopped:
            run()
        assert not stopped.value.code
        return capsys.readouterr().out.split("\n")[:-1]

    return offered


WANTED = {
    "commands": (["tr"], ["try", "train"]),
    "commands of a group": (["explain", "re"], ["relevance", "reconstruct"]),
    "studies": (["study", "s"], ["ssl", "scaling"]),
    "options": (["predict", "m", "--im"], ["--image-size"]),
    "the old name of an option": (["bench", "m", "--bat"], ["--batch-size", "--batch"]),
    "model names": (["inspect", "vit_d"], ["vit_digits"]),
    "models by their short name": (["inspect", "vit_base"], ["vit_base", "vit_base_patch14", "vit_base_patch16"]),
    "recipes": (["train", "mae_"], ["mae_cifar10", "mae_digits", "mae_folder"]),
    "recipes for a study": (["study", "configs", "dig"], ["digits"]),
    "data sources": (["eval", "m", "fash"], ["fashion-mnist"]),
    "exercises": (
        ["learn", ""],
        ["attention", "block", "clip-loss", "mae-masking", "mlp", "patch-embed", "positions", "vit"],
    ),
    "data to check": (["check", "fash"], ["fashion-mnist"]),
    "kinds of an option": (["convert", "a", "b", "--to", "t"], ["timm"]),
    "devices": (["eval", "m", "d", "--device", "c"], ["cpu", "cuda"]),
}


@pytest.mark.parametrize(("words", "wanted"), WANTED.values(), ids=WANTED)
def test_bash_is_offered(ask, words, wanted):
    found = ask("bash", *words)
    assert found[: len(wanted)] == wanted
    assert all(name.startswith(words[-1]) for name in found)


def test_what_is_in_the_package_and_what_was_trained_here(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "photos" / "best").mkdir(parents=True)
    (tmp_path / "runs" / "photos" / "recipe.toml").touch()
    there = [f"bundled:{name}" for name in ("vit", "cifar10", "clip", "digits", "dino", "mae")]
    assert ask("bash", "predict", "") == [*there, "runs/photos/best"]
    assert ask("bash", "explain", "attention", "ru") == ["runs/photos/best"]
    assert ask("bash", "train", "--resume", "") == ["runs/photos"]


def test_bash_ends_a_word_at_a_colon(ask):
    """It tells bundled:ci as bundled, : and ci, and replaces the last of them alone."""
    assert ask("bash", "predict", "bundled", ":", "ci") == ["cifar10"]
    assert ask("bash", "predict", "bundled", ":") == ["vit", "cifar10", "clip", "digits", "dino", "mae"]
    assert ask("bash", "predict", "bundled", ":", "cifar10", "x.png", "--image-s") == ["--image-size"]
    assert ask("bash", "train", "digits", "run.epochs", "=", "3", "--min") == ["--minutes"]


def test_zsh_and_fish_are_offered_the_same_with_the_help_beside_it(ask):
    (line,) = ask("fish", "ver")
    assert line == "verify-resume\tProve that a resumed run ends with the same weights."
    assert ask("fish", "predict", "bundled:ci") == ["bundled:cifar10"]
    (line,) = ask("zsh", "ver")
    assert '"verify-resume":"Prove that a resumed run ends with the same weights."' in line
    assert r"bundled\\:cifar10" in "".join(ask("zsh", "predict", "bundled:ci"))


def test_the_names_offered_are_those_of_the_registry(monkeypatch, tmp_path):
    """The registry imports torch, so the names are kept in the cache: each, and what is a shorter form of it."""
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    names = complete.models("")
    assert set(MODELS) < set(names) and {"vit_base", "swin_t"} <= set(names) and names == sorted(names)
    monkeypatch.setattr("vitlab.models.registry.MODELS", {})
    assert complete.models("") == names  # as they were kept
    kept = tmp_path / "cache" / "model_names.txt"
    for wrong in (b"", b"\xff", b"another package\nvit_other"):
        kept.write_bytes(wrong)
        assert complete.models("") == []  # asked again
    monkeypatch.setenv("VITLAB_CACHE", "/dev/null/cache")  # which cannot be written
    assert complete.models("") == []


def test_completing_imports_neither_torch_nor_numpy():
    complete.models("")  # once, after models/ changed
    code = "import sys\nfrom vitlab.cli import complete as c\n"
    code += "for ask in (c.models, c.checkpoints, c.recipes, c.sources, c.exercises, c.runs): ask('')\n"
    code += "import vitlab.cli.main\nsys.exit(' '.join({'torch', 'numpy'} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


def test_bash_itself_completes(tmp_path):
    """The script of --show-completion, sourced by bash, which then asks as it does at Tab."""
    environment = {**os.environ, "PATH": f"{VITLAB.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # so that the shell is named, not guessed
    script = 'eval "$(vitlab --show-completion bash)"; COMP_WORDS=(vitlab predict bundled : ci); COMP_CWORD=4; '
    script += '_vitlab_completion vitlab; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, env=environment, encoding="utf-8"
    )
    assert done.stdout.strip() == "cifar10", done.stderr


FILES = {"bash": ".bash_completions/vitlab.sh", "zsh": ".zfunc/_vitlab", "fish": ".config/fish/completions/vitlab.fish"}


@pytest.mark.parametrize(("shell", "file"), FILES.items())
def test_completion_is_installed(tmp_path, shell, file):
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [VITLAB, "--install-completion", shell], capture_output=True, text=True, env=environment, encoding="utf-8"
    )
    assert done.returncode == 0 and f"{shell} completion installed" in done.stdout, done
    assert "_VITLAB_COMPLETE" in (tmp_path / file).read_text(encoding="utf-8")


def test_layouts_are_those_of_the_writers():
    from vitlab.checkpoints.convert import TARGETS

    assert sorted(complete.layouts()) == sorted(TARGETS)
