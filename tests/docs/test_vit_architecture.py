"""docs/{en,zh}/vit_architecture.md: the code runs, every number is one the real model gives, both languages agree.

All models stand on the meta device: shapes, parameter counts and MACs are exact there and cost no memory.
`problems` checks one page's text; a last test changes every number of the page and asks that `problems` notices.
"""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitlab.layers.attention import attention_weights
from vitlab.layers.block import gelu_tanh, quick_gelu
from vitlab.layers.positions import relative_index, rotary_2d, sincos_2d
from vitlab.layers.trace import Trace
from vitlab.models import vit
from vitlab.models.entry import HALF, IMAGENET
from vitlab.models.registry import build, build_config
from vitlab.models.vit import VisionTransformer

ROOT = Path(__file__).parents[2]
PAGES = {language: ROOT / "docs" / language / "vit_architecture.md" for language in ("en", "zh")}

ALLOWED = {  # numbers that are other people's definitions, so that no model of ours can give them
    "1e-12": "layer_norm_eps of Hugging Face's ViTConfig and ViTMAEConfig",
}
VARIANTS = {
    "Ti/16": (vit.vit_tiny, 16),
    "S/16": (vit.vit_small, 16),
    "B/32": (vit.vit_base, 32),
    "B/16": (vit.vit_base, 16),
    "L/16": (vit.vit_large, 16),
    "H/14": (vit.vit_huge, 14),
}
EPS = [["1e-6"], ["1e-12"], ["1e-5"], ["1e-5", "1e-6"]]  # the rows of the table of eps
POOLINGS = ("class", "class_norm", "mean", "mean_norm", "class_mean", "attention")
STEPS = (  # rows of the first table that are one step of one block, or of the model
    *("patch_embed", "prefix", "positions", "norm1", "qkv", "attention", "heads", "proj", "norm2", "fc1", "fc2"),
    *("tokens", "norm", "pool", "head"),
)


# ---------------------------------------------------------------- what the real model gives


@cache
def base(variant: str = "B/16", **options) -> VisionTransformer:
    builder, patch_size = VARIANTS[variant]
    with torch.device("meta"):
        return builder(patch_size=patch_size, **options).eval()


def parameters(*parts: nn.Module | Tensor) -> int:
    return sum(t.numel() for part in parts for t in ([part] if isinstance(part, Tensor) else part.parameters()))


@cache
@torch.no_grad()
def macs_by_module(model: VisionTransformer, size: int = 224) -> dict[str, int]:
    with FlopCounterMode(display=False, depth=None) as counter:
        model(torch.empty(1, 3, size, size, device="meta"))
    counts = {name.removeprefix("VisionTransformer."): sum(ops.values()) for name, ops in counter.flop_counts.items()}
    assert all(count % 2 == 0 for count in counts.values())
    return {name: count // 2 for name, count in counts.items()}


def macs(model: VisionTransformer, size: int = 224) -> int:
    return macs_by_module(model, size)["Global"]


@cache
def score_macs() -> int:
    """q k^T of one layer, counted alone."""
    q = torch.empty(1, 12, 197, 64, device="meta")
    with FlopCounterMode(display=False) as counter:
        attention_weights(q, q, None, 64**-0.5)
    return counter.get_total_flops() // 2


@cache
def steps() -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Name of a step -> shape without the batch, parameters, MACs."""
    model = base()
    trace = Trace(*STEPS, layers=[0])
    model(torch.empty(2, 3, 224, 224, device="meta"), trace=trace)
    block, cost = model.blocks[0], macs_by_module(model)
    linear = {
        "qkv": block.attention.qkv,
        "proj": block.attention.proj,
        "fc1": block.mlp.fc1,
        "fc2": block.mlp.fc2,
    }
    weights = {
        "patch_embed": parameters(model.patch_embed),
        "prefix": parameters(model.class_token),
        "positions": parameters(model.positions),
        "norm1": parameters(block.norm1),
        "norm2": parameters(block.norm2),
        "tokens": parameters(block),
        "norm": parameters(model.norm),
        "head": parameters(model.head),
        **{name: parameters(layer) for name, layer in linear.items()},
    }
    products = cost["blocks.0.attention"] - cost["blocks.0.attention.qkv"] - cost["blocks.0.attention.proj"]
    multiplied = {
        "patch_embed": cost["patch_embed"],
        "qkv": cost["blocks.0.attention.qkv"],
        "attention": score_macs(),
        "heads": products - score_macs(),
        "proj": cost["blocks.0.attention.proj"],
        "fc1": cost["blocks.0.mlp.fc1"],
        "fc2": cost["blocks.0.mlp.fc2"],
        "tokens": cost["blocks.0"],
        "head": cost["head"],
    }
    found = {}
    for name in STEPS:
        value = trace[name, 0] if (name, 0) in trace else trace[name]
        found[name] = (tuple(value.shape[1:]), weights.get(name, 0), multiplied.get(name, 0))
    every_block = sum(cost[f"blocks.{layer}"] for layer in range(model.config.depth))
    found["blocks"] = (found["tokens"][0], parameters(model.blocks), every_block)
    found["total"] = (found["head"][0], parameters(model), cost["Global"])
    return found


@cache
def letters() -> dict[str, tuple[int, ...]]:
    c = base().config
    patches = c.grid[0] * c.grid[1]
    head_dim = base().blocks[0].attention.head_dim
    by_letter = {
        "C": c.channels,
        "P": c.patch_size,
        "N": patches,
        "D": c.width,
        "h": c.heads,
        "d": head_dim,
        "L": c.depth,
    }
    return {**{letter: (value,) for letter, value in by_letter.items()}, "B": (), "H, W": c.image_size}


@cache
def variants() -> dict[str, tuple[int, ...]]:
    """D, L, h, d, tokens, parameters, MACs of every row of the variant table."""
    found = {}
    for name in VARIANTS:
        model = base(name)
        c, attention = model.config, model.blocks[0].attention
        assert parameters(model.blocks[0]) == 12 * c.width**2 + 13 * c.width
        tokens = model.positions.table.shape[1]
        found[name] = (c.width, c.depth, c.heads, attention.head_dim, tokens, parameters(model), macs(model))
    return found


@cache
def position_parameters() -> dict[str, int]:
    none = parameters(base(positions="none"))
    return {kind: parameters(base(positions=kind)) - none for kind in ("learned", "sincos", "rotary", "relative")}


@cache
def pooling_parameters() -> dict[str, int]:
    return {kind: parameters(base(pooling=kind)) for kind in POOLINGS}


def activations(x: float) -> tuple[float, ...]:
    """ReLU, GELU, its two approximations, and the gradients of the first two, at one point."""
    t = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    values = [f(t) for f in (F.relu, F.gelu, gelu_tanh, quick_gelu)]
    slopes = [torch.autograd.grad(value, t)[0] for value in values[:2]]
    return tuple(value.item() for value in (*values, *slopes))


@cache
def facts() -> dict[str, int | float | str]:
    """Every number from 10 on, or with a decimal point, that a page may use; a str counts only as it is written."""
    model, large = base(), base(image_size=384)
    c, attention = model.config, model.blocks[0].attention
    found: dict[str, int | float | str] = {
        "classes": c.classes,
        "block: D^2": 12,
        "block: D": 13,
    }  # the two: see variants()
    for letter, values in letters().items():
        found |= {f"{letter} {i}": value for i, value in enumerate(values)}
    for name, (shape, weights, cost) in steps().items():
        found |= {f"{name} shape {i}": n for i, n in enumerate(shape)}
        found |= {f"{name} parameters": weights, f"{name} MACs": cost}
    for name, values in variants().items():
        found |= {f"{name} {i}": value for i, value in enumerate(values)} | {f"{name} patch": int(name.split("/")[1])}

    found |= {"grid": c.grid[0], "patch numbers": model.patch_embed.proj.weight[0].numel()}
    distilled = base(distill_token=True)
    found["distilled tokens"] = distilled.positions.table.shape[1]
    entry, dino = build_config("dinov2_base_registers")
    seen = Trace("norm")
    with torch.device("meta"):
        build(entry.family, replace(dino, depth=1))(torch.empty(1, 3, *dino.image_size), trace=seen)
    found |= {"dino size": dino.image_size[0], "dino patch": dino.patch_size, "dino grid": dino.grid[0]}
    found["dino tokens"] = seen["norm"].shape[1]
    assert dino.prefix == ("class", *["register"] * 4) and dino.positioned_prefix == 1

    assert sincos_2d((2, 3), c.width).shape == (1, 6, c.width)
    found |= {"sincos frequencies": c.width // 4}
    found["sincos temperature"] = int(inspect.signature(sincos_2d).parameters["temperature"].default)
    pairs = rotary_2d(c.grid, attention.head_dim, 100.0, prefix=1)[0].shape[-1]
    found |= {"rotary pairs": pairs, "rotary pairs by row": pairs // 2}
    offsets, on_one_axis = (relative_index(grid, prefix=0).unique().numel() for grid in (c.grid, (c.grid[0], 1)))
    found |= {"offsets": offsets, "offsets on one axis": on_one_axis}
    found["relative numbers"] = parameters(base(positions="relative").blocks[0].attention.relative)
    found["relative rows"] = relative_index(c.grid, prefix=1).unique().numel()
    found |= {f"{kind} positions": count for kind, count in position_parameters().items()}
    found |= {"384": large.config.image_size[0], "grid at 384": large.config.grid[0]}
    found |= {"patches at 384": large.config.grid[0] ** 2, "tokens at 384": large.positions.table.shape[1]}
    assert model.layout(7 * 16, 28 * 16).grid == (7, 28) and model.layout(224, 224).grid == (14, 14)
    found |= {"wide grid": 28, "wide height": 7 * 16, "wide width": 28 * 16}

    n, n_large, heads = found["prefix shape 0"], found["tokens at 384"], c.heads
    found |= {"uniform weight": 1 / n, "weights": heads * n**2, "weights at 384": heads * n_large**2}
    found |= {"weights grow": n_large**2 / n**2, "tokens grow": n_large / n, "too small by": heads**0.5}
    products, products_large = (2 * c.depth * size**2 * c.width for size in (n, n_large))
    assert products == 2 * c.depth * score_macs()
    found |= {"share": 100 * products / macs(model), "share at 384": 100 * products_large / macs(large, 384)}
    found |= {"products": products, "without products": macs(model) - products, "even": 6 * c.width}
    assert 12 * found["even"] * c.width**2 == 2 * found["even"] ** 2 * c.width
    found |= {"FLOPs": 2 * macs(model), "MACs at 384": macs(large, 384), "grows": macs(large, 384) / macs(model)}
    found |= {"parameters at 384": parameters(large)}

    with torch.random.fork_rng():
        torch.manual_seed(1)
        q, k = torch.randn(2000, 1, 64), torch.randn(2000, 197, 64)
        for name, scale in (("peak", 1.0), ("scaled peak", 64**-0.5)):
            found[name] = attention_weights(q, k, None, scale).amax(-1).mean().item()

    mlp = model.blocks[0].mlp
    found |= {"mlp": parameters(mlp), "all mlps": c.depth * parameters(mlp)}
    x = torch.linspace(-8, 8, 160_001, dtype=torch.float64)
    found |= {"gelu lowest": -F.gelu(x).min().item(), "gelu lowest at": -x[F.gelu(x).argmin()].item()}
    found["tanh error"] = (F.gelu(x) - gelu_tanh(x)).abs().max().item()
    found["quick error"] = (F.gelu(x) - quick_gelu(x)).abs().max().item()
    found["quick factor"] = torch.logit(quick_gelu(torch.ones((), dtype=torch.float64))).item()  # 1 * sigmoid(1.702)
    for at in (-3.0, -2.0, -1.0, -0.5, 1.0, 2.0):
        found |= {f"at {at}": abs(at)} | {
            f"activation {i} at {at}": f"{abs(y):.4f}" for i, y in enumerate(activations(at))
        }

    found |= {"eps": model.norm.eps, "torch eps": nn.LayerNorm(8).eps}
    found |= {"post-norm": parameters(base(norm="post")), "tanh layer": parameters(base(head_hidden=768).pre_logits)}
    found |= {"pooled width": base(pooling="class_mean").feature_width}
    found |= {f"pooling {kind}": count for kind, count in pooling_parameters().items()}
    found |= {"both norms": parameters(model.blocks[0].norm1, model.blocks[0].norm2)}
    white = [(1 - mean) / std for mean, std in zip(IMAGENET["mean"], IMAGENET["std"], strict=True)]
    found |= {"white": max(white), "half": HALF["mean"][0], "white of half": (1 - HALF["mean"][0]) / HALF["std"][0]}
    return found


# ---------------------------------------------------------------- what a page says

NUMBER = re.compile(r"(?<![A-Za-z0-9_.])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(e-?\d+)?(?: ?([GM])\b)?")
UNITS = {"G": 1e9, "M": 1e6, None: 1}
EQUATION = re.compile(r"[\d(][\d,.×+²()/ ]*(?:= [\d,.×+²()/ ]*[\d)])+")


def prose(text: str) -> list[tuple[int, str]]:
    """Lines with their numbers, without code blocks, link targets and arXiv ids."""
    lines, code = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            code = not code
        elif not code:
            lines.append((number, re.sub(r"arXiv:\d{4}\.\d{5}|\]\([^)]*\)", "", line)))
    return lines


def numbers(line: str) -> list[str]:
    return [match[0] for match in NUMBER.finditer(line)]


def is_checked(number: str) -> bool:
    whole, fraction, exponent, unit = NUMBER.fullmatch(number).groups()
    return bool(fraction or exponent or unit) or int(whole.replace(",", "")) >= 10


def is_known(number: str) -> bool:
    whole, fraction, exponent, unit = NUMBER.fullmatch(number).groups()
    if number in ALLOWED or number in facts().values():
        return True
    if exponent:
        return float(number) in facts().values()
    if not fraction and not unit:
        return int(whole.replace(",", "")) in facts().values()
    places = len(fraction or ".") - 1
    said = whole.replace(",", "") + (fraction or "")
    return any(
        f"{value / UNITS[unit]:.{places}f}" == said
        for value in facts().values()
        if isinstance(value, float) or (unit and isinstance(value, int))
    )


def value_of(expression: str) -> float:
    """`3 × 16² + 1` as a number; the pattern that finds expressions lets only digits and these signs in."""
    return eval(expression.replace(",", "").replace("×", "*").replace("²", "**2"), {"__builtins__": {}})


def equations(words: str) -> list[str]:
    """`2 × 768 = 1,536` and the like; maths with letters is left out."""
    return EQUATION.findall(re.sub(r"\$[^$]*\$", "", words))


def equation_holds(equation: str) -> bool:
    first, *rest = (side.strip(" .,") for side in equation.split("="))
    places = [len(side.partition(".")[2]) for side in rest]
    return all(
        abs(value_of(first) - value_of(side)) <= 0.5 * 10**-k * bool(k) for side, k in zip(rest, places, strict=True)
    )


def tables(text: str) -> list[list[tuple[int, list[str]]]]:
    """Tables as rows of (line number, cells), without the head's rule."""
    found, last = [], -1
    for number, line in prose(text):
        if line.startswith("|"):
            if number != last + 1:
                found.append([])
            if not line.startswith("|---"):
                found[-1].append((number, [cell.strip() for cell in line.strip("|").split("|")]))
            last = number
    return found


def integer(cell: str) -> int:
    return int(cell.replace(",", ""))


def table_problems(text: str) -> list[str]:
    """Each table against the model, cell by cell, so that a true number in the wrong row is found as well."""
    letter_table, step_table, position_table, activation_table, eps_table, pooling_table, hand, variant_table, _ = (
        tables(text)
    )
    wrong = []

    def expect(line: int, said: object, true: object) -> None:
        if said != true:
            wrong.append(f"{line}: the table says {said}, the model {true}")

    expect(0, {cells[0].strip("$") for _, cells in letter_table[1:]}, set(letters()))
    for line, cells in letter_table[1:]:
        expect(line, tuple(int(n) for n in numbers(cells[2])), letters()[cells[0].strip("$")])
    expect(0, [_key(cells) for _, cells in step_table[1:]], [*STEPS[:12], "blocks", *STEPS[12:], "total"])
    for line, cells in step_table[1:]:
        shape = tuple(int(n) for n in numbers(cells[2]))
        expect(line, (shape, integer(cells[3]), integer(cells[4])), steps()[_key(cells)])
    expect(0, {_key(cells): integer(cells[3]) for _, cells in position_table[1:]}, position_parameters())
    expect(0, {_key(cells): integer(cells[2]) for _, cells in pooling_table[1:]}, pooling_parameters())
    expect(eps_table[0][0], [numbers(cells[1]) for _, cells in eps_table[1:]], EPS)
    for line, cells in activation_table[1:]:
        for said, true in zip(cells[1:], activations(float(cells[0])), strict=True):
            places = len(said.partition(".")[2])
            expect(line, said, f"{abs(true) if true == 0 else true:.{places}f}")
    expect(0, [cells[0] for _, cells in variant_table[1:]], list(VARIANTS))
    for line, cells in variant_table[1:]:
        *exact, cost = variants()[cells[0]]
        expect(line, [*map(integer, cells[1:7]), cells[7]], [*exact, f"{cost / 1e9:.2f} G"])

    results = [[_last_number(cell) for cell in cells[1:]] for _, cells in hand[1:]]
    last_seven, block = results[3:10], results[10]
    expect(hand[11][0], block, [sum(column) for column in zip(*last_seven, strict=True)])
    expect(hand[0][0], [row[0] for row in results], [steps_sum(names, 1) for names in BY_HAND])
    expect(hand[0][0], [row[1] for row in results], [steps_sum(names, 2) for names in BY_HAND])
    return wrong


BY_HAND = (  # the rows of the table of counts, as sums of steps
    *(("patch_embed",), ("prefix",), ("positions",), ("norm1", "norm2"), ("qkv",), ("attention",), ("heads",)),
    *(("proj",), ("fc1",), ("fc2",), ("tokens",), ("blocks",), ("norm",), ("head",)),
)


def steps_sum(names: tuple[str, ...], column: int) -> int:
    return sum(steps()[name][column] for name in names)


def _key(cells: list[str]) -> str:
    return re.match(r"`(\w+)`", cells[0])[1]


def _last_number(cell: str) -> int:
    """The result of a cell of the counting table; words ("not counted") are 0."""
    found = numbers(cell)
    return integer(found[-1]) if found else 0


def problems(text: str) -> list[str]:
    """What is wrong with a page's numbers, as `line: why`."""
    wrong = []
    for line, words in prose(text):
        for number in numbers(words):
            if is_checked(number) and not is_known(number):
                wrong.append(f"{line}: {number} is no number of the model: {words[:100]}")
        wrong += [f"{line}: {equation} does not hold" for equation in equations(words) if not equation_holds(equation)]
    return wrong + table_problems(text) + formula_problems(text)


def formula_problems(text: str) -> list[str]:
    """The two formulas, parameters and MACs in letters, for every row of the variant table."""
    [(line, formulas)] = [(line, words) for line, words in prose(text) if words.startswith("$$(CP^2")]
    wrong = []
    for column, formula in zip((-2, -1), formulas.strip("$").split(r"\qquad"), strict=True):
        spelled = re.sub(r"(?<=[\w)])(?=[A-Za-z(])", "*", formula.strip().replace("^", "**"))  # 12nD^2 is 12*n*D**2
        for name, (D, L, _, _, n, *counts) in variants().items():
            known = {"C": 3, "D": D, "K": 1000, "L": L, "N": n - 1, "P": int(name.split("/")[1]), "n": n}
            if (value := eval(spelled, {"__builtins__": {}}, known)) != counts[column]:
                wrong.append(f"{line}: {formula} is {value} for {name}, but the model has {counts[column]}")
    return wrong


# ---------------------------------------------------------------- tests


@pytest.fixture(params=PAGES)
def page(request) -> Path:
    return PAGES[request.param]


def test_every_number_is_one_of_the_model(page):
    found = problems(page.read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(f"{page.relative_to(ROOT)}:{problem}" for problem in found)


def test_equations_and_tables_are_found(page):
    text = page.read_text(encoding="utf-8")
    assert sum(len(equations(words)) for _, words in prose(text)) > 30
    assert not set(ALLOWED) - {number for _, words in prose(text) for number in numbers(words)}, "not needed any more"
    names = {_key(cells) for _, cells in tables(text)[1][1:]} - {"blocks", "total"}
    assert names <= set(base().traceable)


def test_a_wrong_number_is_noticed(page):
    """Add 1 to the last digit of every number in turn. What stays unnoticed must be few, small and named here."""
    text = page.read_text(encoding="utf-8")
    lines, unnoticed, changed = text.splitlines(), [], 0
    for line, words in prose(text):
        if not any(map(is_checked, numbers(words))):
            continue
        original = lines[line - 1]
        for match in NUMBER.finditer(original):
            if not is_checked(match[0]) or "arXiv:" in original[max(0, match.start() - 6) : match.start() + 1]:
                continue
            end = match.end() - (len(match[0]) - len(match[0].rstrip(" GM")))
            digit = str((int(original[end - 1]) + 1) % 10)
            lines[line - 1] = original[: end - 1] + digit + original[end:]
            changed += 1
            if not _noticed("\n".join(lines), line):
                unnoticed.append(match[0])
        lines[line - 1] = original
    assert changed > 300
    assert set(unnoticed) <= {"12", "196", "197", "576"} and len(unnoticed) < 0.05 * changed


def _noticed(text: str, line: int) -> bool:
    """`problems`, but prose is looked at in one line only: the others have not changed."""
    words = dict(prose(text))[line]
    if any(is_checked(number) and not is_known(number) for number in numbers(words)):
        return True
    if not all(map(equation_holds, equations(words))):
        return True
    return words.startswith(("|", "$$")) and bool(table_problems(text) + formula_problems(text))


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """(first line, code) of every python block."""
    text = page.read_text(encoding="utf-8")
    return [
        (text[: match.start(1)].count("\n"), match[1]) for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    ]


def test_code_runs_from_top_to_bottom(tmp_path):
    """As one script, with blank lines for the prose, so that a failure names the line of the page. Both languages hold
    the same code, as the next test says, so once is enough.
    """
    script, page = "", PAGES["en"]
    for line, code in blocks_of(page):
        assert "assert " in code, f"{page.name}:{line}: a block that checks nothing"
        script += "\n" * (line - script.count("\n")) + code
    (tmp_path / "page.py").write_text(script, encoding="utf-8")
    with torch.random.fork_rng():
        runpy.run_path(str(tmp_path / "page.py"))


def test_both_languages_say_the_same():
    english, chinese = (page.read_text(encoding="utf-8") for page in PAGES.values())
    assert len(english.splitlines()) == len(chinese.splitlines())
    assert [line for line, _ in prose(english)] == [line for line, _ in prose(chinese)]
    for (line, ours), (_, theirs) in zip(prose(english), prose(chinese), strict=True):
        assert numbers(ours) == numbers(theirs), f"line {line}: {ours}\n{theirs}"
        assert re.match(r"#*", ours)[0] == re.match(r"#*", theirs)[0] and ours.count("|") == theirs.count("|"), line
        if ours.startswith("$$"):
            assert ours == theirs
        codes = [sorted(re.findall(r"`[^`]+`", words)) for words in (ours, theirs)]
        assert codes[0] == codes[1], f"line {line}: {codes}"
        maths = [sorted(re.findall(r"\$[^$]+\$", words)) for words in (ours, theirs)]
        assert maths[0] == maths[1], f"line {line}: {maths}"
    for (line, ours), (_, theirs) in zip(*(blocks_of(page) for page in PAGES.values()), strict=True):
        assert ast.dump(ast.parse(ours)) == ast.dump(ast.parse(theirs)), f"code at line {line}"


def test_maths_and_links_work_on_github(page):
    """GitHub wants a space before $ (also after Chinese punctuation), and eats a backslash before punctuation."""
    text = page.read_text(encoding="utf-8")
    for line, words in prose(text):
        for match in re.finditer(r"\$\$?[^$]+\$\$?", words):
            before = words[: match.start()]
            assert not before or before[-1] == " ", f"{page.name}:{line}: {match[0]}"
            assert not re.search(r"\\[^A-Za-z ]", match[0]), f"{page.name}:{line}: {match[0]}"
    for target in re.findall(r"\]\((\S+\.md)\)", text):
        assert (page.parent / target).exists(), target


def test_flop_counter_misses_fused_attention_on_cpu():
    """The page tells readers to count on meta tensors; when torch counts right on CPU too, change the page."""
    model = vit.vit_tiny(patch_size=8, image_size=16, width=48, depth=1, heads=3, classes=5).eval()
    counts = {}
    for device in ("cpu", "meta"):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.to(device)(torch.empty(1, 3, 16, 16, device=device))
        counts[device] = counter.get_total_flops() // 2
    assert counts["meta"] - counts["cpu"] == 2 * 5 * 5 * 48
