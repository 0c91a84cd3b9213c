"""Chinese under a Chinese locale: every help text and the first errors have both languages, JSON stays as it is."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from PIL import Image

import vitlab.cli.main
from vitlab.cli.help import fold, paragraphs
from vitlab.language import read_translations, to_chinese, translate
from vitlab.tables import Table

FRAME = {"Usage", "Arguments", "Options", "Commands", "required", "Show this message and exit."}


@pytest.fixture
def in_chinese(monkeypatch):
    monkeypatch.setenv("VITLAB_LANG", "zh")


def commands(command: Any = None, path: str = "vitlab") -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(vitlab.cli.main.app)
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}")


def test_every_command_and_option_has_both_languages():
    texts = {text for _, command in commands() for text in paragraphs(command.help)}
    texts |= {param.help for _, command in commands() for param in command.params}
    missing = sorted((texts | FRAME) - read_translations()["help"].keys())
    assert not missing, f"without a line in chinese.toml: {missing}"
    stale = sorted(read_translations()["help"].keys() - texts - FRAME)
    assert not stale, f"in chinese.toml, but said by no command: {stale}"


@pytest.mark.parametrize("spoken_here", ["en", "zh"])
def test_the_line_of_a_command_fits_into_a_terminal(command, monkeypatch, spoken_here):
    monkeypatch.setenv("VITLAB_LANG", spoken_here)
    monkeypatch.setenv("COLUMNS", "80")
    for group in ([], ["explain"], ["study"]):
        text = command(*group, "--help").stdout
        listed = text.partition("命令：\n" if spoken_here == "zh" else "Commands:\n")[2].rstrip().splitlines()
        assert len(listed) >= 5 and all(line.startswith("  ") and line[2] != " " for line in listed)  # one line each
        assert "..." not in "".join(listed)


def test_help_in_chinese(command, in_chinese):
    text = command("serve", "--help").stdout
    for part in (
        "用法：vitlab serve",
        "参数：",
        "选项：",
        "[默认：8；x>=1]",
        "通过 HTTP 提供模型",
        "环境变量：VITLAB_TOKEN",
    ):
        assert part in text
    assert "Usage" not in text and "default" not in text


def test_help_in_english_is_ascii(command):
    assert "[default: 8; x>=1]" in command("serve", "--help").stdout
    for path, found in commands():
        assert found.get_help(found.make_context(path, [], resilient_parsing=True)).isascii(), path


FIRST = {
    "unknown command": (
        ["trian"],
        2,
        ["vitlab：错误：没有命令 'trian'。是不是 'train'？", "用 'vitlab -h' 查看帮助。"],
    ),
    "unknown option": (["train", "--resum"], 2, ["没有选项 --resum。相近的选项：--resume"]),
    "nothing given": (["inspect"], 2, ["缺少参数 'NAME|CHECKPOINT'。"]),
    "option left out": (["embed", "x"], 2, ["缺少选项 '-o' / '--out'。"]),
    "no number": (["predict", "m", "x.png", "--top", "many"], 2, ["'--top' 的值无效：得到的是 'many'，应为整数"]),
    "number too small": (["predict", "m", "x.png", "--top", "0"], 2, ["得到的是 '0'，应为不小于 1 的数"]),
    "wrong model name": (["inspect", "vit_bse"], 2, ["没有名为 'vit_bse' 的模型。是不是 'vit_base'"]),
    "a name has no weights": (["predict", "vit_base", "x.png"], 2, ["它是模型名，还没有权重。训练一个：vitlab train"]),
    "no checkpoint": (["predict", "nowhere", "x.png"], 2, ["nowhere：没有这个文件或文件夹。软件包里有：bundled:"]),
    "wrong bundled name": (["predict", "bundled:cifar", "x.png"], 2, ["软件包里没有这个模型；有 vit, cifar10"]),
    "no picture": (
        ["predict", "bundled:digits", "no.png"],
        1,
        ["vitlab：no.png：没有这个文件。", "1 张图片中有 1 张读不了"],
    ),
    "text as picture": (["predict", "bundled:digits", "text.png"], 1, ["text.png：不是能读的图片。支持 jpg"]),
    "folder as picture": (
        ["predict", "bundled:digits", "empty"],
        2,
        ["empty：里面没有图片。请给出图片文件夹或图片文件。"],
    ),
    "no recipe": (["train", "digts"], 2, ["'digts' 不是配方、数据源或文件夹。是不是 'digits'？配方有："]),
    "no folder": (["train", "./photos"], 2, ["./photos：没有这个文件或文件夹（从 "]),
    "empty folder": (
        ["train", "empty"],
        2,
        ["empty：文件夹是空的。把每个类别的图片放进以类别命名的文件夹：empty/cat/1.jpg"],
    ),
    "no data": (
        ["eval", "bundled:digits", "digts"],
        2,
        ["没有数据源 'digts'，也没有这个文件或文件夹。是不是 'digits'"],
    ),
    "wrong exercise": (["learn", "atention"], 2, ["没有练习 'atention'：现有 patch-embed", "是不是 attention？"]),
    "no file of an exercise": (
        ["learn", "mlp", "no.py"],
        2,
        ["no.py：没有这个文件。vitlab learn mlp 会写出起始文件。"],
    ),
    "wrong image size": (
        ["predict", "bundled:digits", "digits#3", "--image-size", "9"],
        2,
        ["图像高度：9 不是 2 的倍数：请用 10（或 8）。"],
    ),
    "no image size": (["predict", "bundled:digits", "x.png", "--image-size", "big"], 2, ["'big' 不是尺寸：请写 384"]),
    "wrong setting": (["train", "digits", "model.dept=3"], 2, ["模型没有选项 'dept'。是不是 'depth'？选项有："]),
    "wrong value": (["train", "digits", "model.depth=many"], 2, ["depth='many' 无效：应为整数。"]),
    "other classes": (
        ["eval", "bundled:cifar10", "digits"],
        2,
        [
            "bundled:cifar10 认识的类别与 digits 的不同：只有检查点有 airplane",
            "只评估特征：--knn, --probe, --few-shot。",
        ],
    ),
    "no such class": (
        ["explain", "relevance", "bundled:digits", "digits#3", "--target", "cat"],
        2,
        ["target='cat' 不是这个模型的类别。也可以给出编号，0 到 9。"],
    ),
    "no such column": (
        ["check", "prices.csv"],
        2,
        ["没有 label 或 class 列（现有 image, price）", "--target price（一个数值）"],
    ),
    "no run": (["train", "--resume", "empty"], 2, ["empty：里面没有 recipe.toml，没有可以继续的训练。"]),
    "text as weights": (["predict", "text.pth", "x.png"], 2, ["text.pth：是文本，不是权重"]),
}


@pytest.mark.parametrize(("args", "code", "says"), FIRST.values(), ids=FIRST)
def test_what_a_newcomer_meets_first_is_in_chinese(command, in_chinese, tmp_path, monkeypatch, args, code, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "prices.csv").write_text("image,price\na.png,2.5\n", encoding="utf-8")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for name in ("text.png", "text.pth"):
        (tmp_path / name).write_text("hello, this is no picture and no model, only words\n", encoding="utf-8")
    told = command(*args, code=code).stderr
    for part in says:
        assert part in told


SAID = {
    "vitlab: saved at step 7 of 90. Resume: vitlab train --resume runs/x": "保存在第 7 步（共 90 步）。继续：vitlab",
    "vitlab: stopped, and saved. The same command continues: vitlab study": "已停止并保存。用同一条命令继续：vitlab",
    "vitlab: stopped.": "vitlab：已停止。",
    "note: the images are not photos: 5 channels of uint16 are read, as stored in the files.": "5 个 uint16 通道",
    "LoRA of rank 8: 60.8% (95 % interval 52.9% to 68.2%, 153 images) on validation, 1 s": "验证集上 60.8%",
    "epoch 1 of 6: val top-1 98.00%, loss 0.0616": "第 1 轮（共 6 轮）：验证 top-1 98.00%，损失 0.0616",
    "LoRA of rank 8: left out, for every validation image is right already.": "没有做，因为验证图片已全部答对",
    "serve needs uvicorn, which is not installed: pip install 'vitlab[serve]'.": "serve 需要 uvicorn，但没有安装：pip",
    "--plot needs matplotlib, which is not installed: pip install 'vitlab[plot]'.": "需要 matplotlib，但没有安装",
}


@pytest.mark.parametrize("english", SAID)
def test_stops_and_missing_packages_are_told_in_chinese(english):
    assert SAID[english] in to_chinese(english)


OURS = """vitlab digits bundled sample attention blocks bias cpu flash fused gelu head heads kernel LayerNorm logit
lens MACs FLOPs MAC MLP mlp norm positions prefix relu softmax sqrt stem token tokens pool proj float qkv stages
merge reduced decoder masked visible embed pixels text projection logits end SigLIP GELU tau cos shortcut block rollout
Grad CAM cat deer horse dog frog automobile tanh LayerScale"""  # names of things and steps, which both languages have


def english_words(text: str) -> set[str]:
    """Words of three letters or more in lines or cells that are ours to say."""
    names = r"[\w./-]*[/.][\w./-]+|\S*_\S*"  # files, steps and models
    return set(re.findall(r"[A-Za-z]{3,}", re.sub(names, " ", text))) - set(OURS.split())


@pytest.mark.parametrize("model", ["bundled:digits", "clip_digits", "mae_digits", "swin_cifar", "resnet_cifar"])
def test_inspect_is_in_chinese(command, in_chinese, model):
    assert not english_words(command("inspect", model).stdout)


def test_predict_is_in_chinese(command, in_chinese):
    out = command("predict", "bundled:cifar10", "sample:cat").stdout
    assert out.split()[:3] == ["图片", "类别", "概率"] and not english_words(out)


@pytest.mark.parametrize("verb", ["relevance", "figure7", "ablate", "lens"])
def test_figures_are_in_chinese(command, in_chinese, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    assert not english_words(command("explain", verb, "bundled:digits", "digits#3", "--out", "figure.svg").stdout)
    texts = re.findall(r">([^<>\n]+)</(?:text|tspan)>", (tmp_path / "figure.svg").read_text(encoding="utf-8"))
    assert any("\u4e00" <= c <= "\u9fff" for c in "".join(texts)) and not english_words("\n".join(texts))


def test_a_table_in_chinese_keeps_names_and_numbers(in_chinese):
    table = Table(["image", "class", "meaning"], [["image", "total", "heads mixed"]], ["class"], prose=["meaning"])
    assert str(table).split() == ["图片", "类别", "含义", "image", "total", "混合各个头"]


@pytest.mark.parametrize("section", ["messages", "results"])
def test_translations_name_what_they_translate(section):
    """Every {name} of a translation stands in its English text, so no text is lost and none is asked for in vain."""
    for english, chinese in read_translations()[section].items():
        names = [set(re.findall(r"\{(\w+)\}", text)) for text in (english, chinese)]
        assert names[1] <= names[0], english
        assert not re.search(r"[，。：；]{2}| $|^ ", chinese), chinese


def test_json_does_not_change_with_the_language(command, in_chinese, tmp_path):
    args = ("predict", "bundled:digits", "digits#3", tmp_path / "no.png", "--json")
    there = json.loads(command(*args, code=1).stdout)
    assert there[1]["error"] == f"{tmp_path / 'no.png'}: no such file."


def test_the_locale_decides(monkeypatch):
    monkeypatch.delenv("VITLAB_LANG", raising=False)
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert translate("vitlab: stopped.") == "vitlab：已停止。"
    assert translate("words that no table knows") == "words that no table knows"
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert translate("vitlab: stopped.") == "vitlab: stopped."


def test_chinese_lines_are_as_wide_as_the_terminal():
    text = "图像块，以及 vitlab explain attention 的图。" * 3
    lines = fold(text, 20).removeprefix("\b\n").split("\n")
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(len(line.encode("gbk").rstrip()) <= 22 for line in lines)  # two bytes for two columns; a comma may hang
    assert not any(line.startswith(("，", "。")) for line in lines)
