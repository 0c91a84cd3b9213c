"""vitlab page build: the page, its models and onnxruntime-web in one folder.

    index.html  page/files/*.js,css  page/static/page.json  page/static/MODEL/{inside,heat,...}.onnx, weights.bin

The folder is complete or absent: it is written beside its place and then moved there.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.explain.walk import as_numbers, walk_through
from vitlab.explain.weights import position_similarity
from vitlab.export.samples import preprocess_batch, sample_images
from vitlab.images.bands import PHOTO
from vitlab.learn import page_links
from vitlab.models.mae import MaskedAutoencoder
from vitlab.models.plain import PlainTransformer
from vitlab.models.two_towers import TwoTowers
from vitlab.serve.model_pool import ServedModel, open_models
from vitlab.serve.page_queries import model_info
from vitlab.serve.page_samples import page_samples
from vitlab.serve.static_page import verify
from vitlab.serve.static_page.graphs import HeatGraph, InsideGraph, Knobs, ReconstructionGraph, TextGraph, plain_encoder
from vitlab.serve.static_page.onnx_files import save_graphs, to_onnx
from vitlab.serve.static_page.runtime import LICENSE, runtime_files
from vitlab.tables import Table, Tabular
from vitlab.text.tokenizer import Tokenizer
from vitlab.version import __version__

PAGE = files("vitlab.serve") / "page"
BROWSER = files("vitlab.serve.static_page") / "browser"
WEIGHTS = "weights.bin"
POSITIONS = "positions.bin"
COMPARED = 2  # photos that every graph is compared on
MAX_WEIGHTS = 100_000_000  # bytes that a visitor would wait for
MAX_OUTPUTS = 400_000_000  # bytes of one pass, which the browser holds several times
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
PRELOAD = re.compile(r'<!-- modulepreload[^>]*-->\n|(<link rel="modulepreload"[^>]*>\n)+')
SEPARATE = {"worker.js", "served.js"}  # modules of another thread, and of the server
LATER = ("stories", "story_")  # loaded when a story is asked for
API_LINK = '<a href="docs" data-t="api"></a>'  # of the server
FOOTER = 'data-t="footer"'


@dataclass(frozen=True)
class BuiltModel:
    name: str
    bytes: int
    difference: float  # the largest of any output, relative to the largest value of its kind (at least 1)


@dataclass
class BuiltPage(Tabular):
    folder: Path
    models: list[BuiltModel] = field(default_factory=list)
    bytes: int = 0
    first_load: int = 0  # bytes that a visitor's browser fetches to show the first model, compressed by gzip
    everything: int = 0  # with all models, compressed by gzip

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}

    def table(self) -> Table:
        rows = [[model.name, f"{model.bytes / 1e6:.2f}", f"{model.difference:.0e}"] for model in self.models]
        note = (
            f"{self.bytes / 1e6:.1f} MB; a visitor fetches {self.first_load / 1e6:.1f} MB for {self.models[0].name}, "
            f"{self.everything / 1e6:.1f} MB for all models (gzip)"
        )
        return Table(["model", "MB", "difference"], rows, right=("MB", "difference"), notes=[note])


def build_page(
    out: str | Path,
    models: Sequence[str] = (),
    *,
    runtime: Path | None = None,
    progress: Callable[[str], object] = lambda name: None,
) -> BuiltPage:
    """Write the page with these models; default: the bundled ones. `runtime`: an archive of onnxruntime-web, for
    machines without npm. `progress` is called with each model's name.
    """
    out = Path(out).expanduser()
    if (
        out.exists()
        and not (out / "page" / "static" / "page.json").is_file()
        and (not out.is_dir() or any(out.iterdir()))
    ):
        raise UsageError(f"{out} exists and holds something else than a page: name a new folder.")
    library = runtime_files(runtime)
    served = open_models(models)
    for one in served:
        check_fits(one)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".page-") as temporary:
        folder = Path(temporary) / "page"
        result = BuiltPage(out)
        described = []
        (folder / "page" / "static").mkdir(parents=True)
        for one in served:
            progress(one.name)
            built, info = _write_model(one, folder / "page" / "static" / safe_name(one.name))
            result.models.append(built)
            described.append(info)
        samples = _write_samples(folder / "page" / "static")
        contents = {"vitlab": __version__, "models": described, "samples": samples, "exercises": page_links()}
        text = json.dumps(contents, ensure_ascii=False, allow_nan=False)
        (folder / "page" / "static" / "page.json").write_text(text, encoding="utf-8")
        _write_page(folder, library)
        _measure(result, folder, described[0]["files"]["folder"])
        if out.exists():
            shutil.rmtree(out)
        folder.replace(out)
    return result


def check_fits(served: ServedModel) -> None:
    """Refuse what a browser cannot show, and say what can."""
    model, remedy = served.model, f"Show it with a server: vitlab serve {served.name}."
    if not isinstance(model.encoder, PlainTransformer):
        raise UsageError(f"{served.name}: a page is built of plain ViTs, and this is a {model.family}. {remedy}")
    if model.encoder.config.needs_full_grid and "relative" in model.encoder.config.position_kind:
        raise UsageError(f"{served.name}: a page cannot show relative position biases yet. {remedy}")
    if served.preprocess.pixels != PHOTO or served.preprocess.how == "aspect":
        raise UsageError(f"{served.name}: a browser reads photos of one size, and this model reads others. {remedy}")
    weights = sum(p.numel() for p in model.parameters()) * 4
    outputs = pass_bytes(model.encoder, served.preprocess.size)
    if weights > MAX_WEIGHTS or outputs > MAX_OUTPUTS:
        raise UsageError(
            f"{served.name}: {weights / 1e6:,.0f} MB of weights and {outputs / 1e6:,.0f} MB of numbers in a pass are "
            f"too much for a browser ({MAX_WEIGHTS / 1e6:.0f} and {MAX_OUTPUTS / 1e6:.0f} at most). {remedy}"
        )


def pass_bytes(encoder: PlainTransformer, size: tuple[int, int]) -> int:
    """Of all outputs of `InsideGraph`, about."""
    c, (rows, columns) = encoder.config, encoder.layout(*size).grid
    N = len(c.prefix) + rows * columns
    return 4 * c.depth * N * (c.heads * N + 8 * c.width + 2 * c.mlp_hidden)


def safe_name(name: str) -> str:
    """A folder's name that is the same in an address."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII).strip(".") or "model"


def _write_model(served: ServedModel, folder: Path) -> tuple[BuiltModel, dict[str, Any]]:
    """Write the graphs of one model, compare them, and describe the model as page.json does."""
    folder.mkdir()
    model, size = served.model.eval(), served.preprocess.size
    encoder = plain_encoder(model)
    zeros, knobs = torch.zeros(1, encoder.config.channels, *size), Knobs.neutral(encoder, size)
    inside, graphs = InsideGraph(model), {}
    graphs["inside"] = to_onnx(inside, {"images": zeros, **knobs._asdict()}, inside.outputs)
    explains = bool(model.classes) or isinstance(model, TwoTowers)
    if explains:
        heat = HeatGraph(model)
        weights = torch.ones(model.feature_width if isinstance(model, TwoTowers) else model.classes)
        example = {"images": zeros, "weights": weights, **knobs._asdict()}
        graphs["heat"] = to_onnx(heat.traced(*example.values()), example, heat.outputs)
    if isinstance(model, MaskedAutoencoder):
        patches = len(knobs.patch_factors)
        example = {"images": zeros, "visible": torch.arange(max(2, patches // 4))}
        graphs["reconstruction"] = to_onnx(ReconstructionGraph(model), example, ReconstructionGraph.outputs, "visible")
    tokenizer = byte_pairs(model.tokenizer) if isinstance(model, TwoTowers) else None
    if isinstance(model, TwoTowers) and tokenizer is not None:
        graphs["text"] = to_onnx(TextGraph(model), {"ids": model.text.blank_ids(1)}, TextGraph.outputs)
    paths = {path.stem: path for path in save_graphs(graphs, folder, WEIGHTS)}
    differences = _compare(served, {name: paths[name] for name in graphs})
    info = model_info(served)
    about = {
        **served.summary(),
        **info,
        "offers": [query for query in info["offers"] if query != "sentences" or "text" in graphs],
        "preprocess": served.preprocess.to_dict(),
        "task": model.task.to_dict(),
        "files": {"folder": folder.name, "weights": WEIGHTS, **{name: f"{name}.onnx" for name in graphs}},
    }
    if "walk" in info["offers"]:
        about["walk"] = {"steps": steps_of(encoder, zeros)}
    if encoder.positions is not None:
        table = position_similarity(encoder, encoder.layout(*size).grid).numpy().astype("<f4")
        (folder / POSITIONS).write_bytes(table.tobytes())
        about["files"]["positions"] = POSITIONS
    if isinstance(model, TwoTowers) and tokenizer is not None:
        about |= {"tokenizer": tokenizer, "scale": model.scale.item()}
        about["bias"] = None if model.bias is None else model.bias.item()
    size_on_disk = sum(file.stat().st_size for file in folder.iterdir())
    largest = max(d.difference / max(1.0, d.largest) for d in differences)
    return BuiltModel(served.name, size_on_disk, largest), about


def steps_of(encoder: PlainTransformer, images: Tensor) -> list[dict[str, Any]]:
    """Shapes and costs of every step, which are the same for all images of this size."""
    names = ("name", "shape", "equation", "parameters", "macs")
    return [{name: step[name] for name in names} for step in as_numbers(walk_through(encoder, images))["steps"]]


def _compare(served: ServedModel, graphs: dict[str, Path]) -> list[verify.OutputDifference]:
    model = served.model
    images = preprocess_batch(model, sample_images(COMPARED, channels=model.encoder.config.channels))
    compared: dict[str, Callable[[verify.PageSession], list[verify.OutputDifference]]] = {
        "inside": lambda session: verify.compare_inside(model, session, images),
        "heat": lambda session: verify.compare_heat(model, session, images),
    }
    if isinstance(model, MaskedAutoencoder):
        compared["reconstruction"] = lambda session: verify.compare_reconstruction(model, session, images)
    if isinstance(model, TwoTowers):
        compared["text"] = lambda session: verify.compare_text(model, session)
    differences = []
    for name, path in graphs.items():
        outputs = compared[name](verify.PageSession(path))
        verify.require_equal(served.name, name, outputs)
        differences += outputs
    return differences


def byte_pairs(tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """What tokenizer.js needs of a CLIP's tokenizer; None: it is of another kind, which JavaScript does not read."""
    if tokenizer is None or tokenizer.start_id is None:
        return None
    model = json.loads(tokenizer.to_json())["model"]
    if model["type"] != "BPE" or model.get("end_of_word_suffix") != "</w>" or tokenizer.padding_side != "right":
        return None
    return {
        "vocab": model["vocab"],
        "merges": model["merges"],
        "context": tokenizer.context,
        "start": tokenizer.start_id,
        "end": tokenizer.end_id,
        "padding": tokenizer.pad_id,
    }


def _write_samples(folder: Path) -> list[dict[str, str]]:
    """The photos that the page offers; their names, files and licences."""
    (folder / "samples").mkdir()
    described = []
    for name, sample in page_samples().items():
        file = f"samples/{safe_name(name)}.{sample.media_type.partition('/')[2]}"
        (folder / file).write_bytes(sample.read())
        described.append({"name": name, "file": file, "licence": sample.licence})
    return described


def _write_page(folder: Path, library: Sequence[Path]) -> None:
    """The page's own files, with numbers from static.js instead of a server."""
    target = folder / "page" / "files"
    for source in (PAGE, BROWSER):
        with as_file(source) as path:
            shutil.copytree(path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("index.html", "served.js"))
    (target / "source.js").write_text('export { source } from "./static.js";\n', encoding="utf-8")
    for file in library:
        shutil.copyfile(file, target / file.name)
    (target / "ONNXRUNTIME-LICENSE.txt").write_text(LICENSE, encoding="utf-8")
    (folder / "index.html").write_text(static_html((PAGE / "index.html").read_text(encoding="utf-8")), encoding="utf-8")


def static_html(html: str) -> str:
    """The page's HTML with its policy, which a server sends in a header, and without what needs a server."""
    names = {entry.name for folder in (PAGE, BROWSER) for entry in folder.iterdir() if entry.name.endswith(".js")}
    names = sorted(name for name in names - SEPARATE if not name.startswith(LATER))
    preloaded = "".join(f'<link rel="modulepreload" href="page/files/{name}">\n' for name in names)
    html, replaced = PRELOAD.subn(preloaded, html, count=1)
    assert replaced, "the page does not say where its modules are named"
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    for before, after in (("<head>", f"<head>\n{policy}"), (API_LINK, ""), (FOOTER, 'data-t="footer_static"')):
        assert html.count(before) == 1, f"the page has {html.count(before)} times {before}"
        html = html.replace(before, after)
    return html


def _measure(result: BuiltPage, folder: Path, first_model: str) -> None:
    """Sizes on disk and over the wire."""
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        content = file.read_bytes()
        packed = min(len(content), len(gzip.compress(content, 6)))
        result.bytes += len(content)
        result.everything += packed
        models = folder / "page" / "static"
        of_a_model = models in file.parents and file.parent not in (models, models / "samples")
        if not of_a_model or (file.parent.name == first_model and file.stem in ("inside", "heat", "weights")):
            result.first_load += packed
