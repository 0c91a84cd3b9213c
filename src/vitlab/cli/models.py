"""vitlab models."""

from __future__ import annotations

from vitlab.cli.console import count, out, print_json, short
from vitlab.errors import UsageError
from vitlab.explain.sizes import size_of
from vitlab.models.registry import MODELS, list_models


def run(pattern: str, json: bool) -> None:
    names = list_models(pattern)
    if not names:
        raise UsageError(f"no model's name matches {pattern!r}. `vitlab models` lists all.")
    rows = []
    for name in names:
        config = MODELS[name].config
        parameters, macs = size_of(name)
        rows.append(
            {
                "name": name,
                "aliases": list(MODELS[name].aliases),
                "image_size": list(config.image_size),  # type: ignore[attr-defined]
                "parameters": parameters,
                "macs": macs,
            }
        )
    if json:
        print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("image", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("MACs", justify="right", no_wrap=True)
    table.add_column("also called")
    for row in rows:
        size = " x ".join(map(str, row["image_size"]))
        table.add_row(row["name"], size, count(row["parameters"]), short(row["macs"]), ", ".join(row["aliases"]))
    out().print(table)
    out().print(
        "MACs for one image (of a CLIP, with one text); 1 MAC = 2 FLOPs. timm's names work too: vit_base_patch16_384."
    )
