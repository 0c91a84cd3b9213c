"""vitlab study."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitlab.cli.console import out, print_json_text, print_plain, say
from vitlab.cli.progress import counting, following_downloads
from vitlab.cli.runs import FORMATS, TITLES
from vitlab.cli.train import Bar, Beside
from vitlab.errors import UsageError
from vitlab.export.timing import TimingOptions
from vitlab.study.configs import Study, study_configs
from vitlab.study.data_efficiency import display_table as efficiency_table
from vitlab.study.data_efficiency import study_data_efficiency
from vitlab.study.folder import PLOT
from vitlab.study.grid import short_keys
from vitlab.study.model_spec import parse_numbers
from vitlab.study.scaling import caption, display_growth, study_scaling
from vitlab.study.scaling import display_row as scaling_row
from vitlab.study.ssl import SSLStudy, study_ssl
from vitlab.study.table import BEST, display_rows
from vitlab.study.tokens import display_row as tokens_row
from vitlab.study.tokens import study_tokens
from vitlab.training.loop import Stopped
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import DataRecipe
from vitlab.training.runlog import to_json
from vitlab.training.runs import shown, to_csv, to_markdown

SPARED = ("images_per_second", "loss", "params", "seconds")  # in this order, where there is no room


def configs(what: str | None, settings: list[str], folder: Path | None, format: str, json: bool) -> None:
    if format not in FORMATS:
        raise UsageError(f"--format {format!r} is not known: use {', '.join(FORMATS)}.")
    if what is not None and "=" in what and not Path(what).exists():  # vitlab study configs model.depth=4,6
        what, settings = None, [what, *settings]
    name, recipe = find_recipe(what)
    command = shlex.join(["vitlab", *sys.argv[1:]])
    on_screen = sys.stdout.isatty() and format == "table" and not json
    try:
        with following_downloads(), OneBar() if on_screen else Beside() as show:
            study = study_configs(name, recipe, settings, folder, command=command, show=show)
    except (Stopped, KeyboardInterrupt):
        say(f"vitlab: stopped, and saved. The same command goes on: {command}")
        raise SystemExit(130) from None
    _show(study, format, json)
    if study.failed:
        say(f"{len(study.failed)} of {len(study.outcomes)} runs failed: the reasons are in {study.folder}/results.csv.")
        raise SystemExit(1)


def ssl(
    source: str,
    methods: str,
    path: str | None,
    per_class: int | None,
    fraction: float | None,
    pretrain: list[str],
    few: list[str],
    pretrained: list[str],
    folder: Path | None,
    json: bool,
) -> None:
    command = shlex.join(["vitlab", *sys.argv[1:]])
    asked = [name.strip() for name in methods.split(",") if name.strip()]
    data = DataRecipe(source, path, per_class=per_class, fraction=fraction)
    settings: dict[str, Any] = dict(pretrain=pretrain, few=few, pretrained=pretrained)
    try:
        with following_downloads(), OneBar() if sys.stdout.isatty() and not json else Beside() as show:
            study = study_ssl(data, asked, **settings, folder=folder, command=command, show=show)
    except (Stopped, KeyboardInterrupt):
        say(f"vitlab: stopped, and saved. The same command goes on: {command}")
        raise SystemExit(130) from None
    print_json_text(to_json(study.rows)) if json else _print_ssl(study)
    _say_where(study.folder)
    if study.failed:
        raise SystemExit(1)


def tokens(
    checkpoint: str,
    source: str,
    path: str | None,
    ways: list[str],
    batch: int,
    rounds: int,
    images: int | None,
    folder: Path | None,
    json: bool,
) -> None:
    command = shlex.join(["vitlab", *sys.argv[1:]])
    data, timing = DataRecipe(source, path), TimingOptions(batch, rounds)
    with following_downloads():
        study = study_tokens(
            *(checkpoint, data), ways=ways, timing=timing, images=images, folder=folder, command=command, watch=counting
        )
    for note in study.notes:
        say(f"note: {note}")
    print_json_text(to_json(study.rows)) if json else _print_plain([tokens_row(row) for row in study.rows], "way")
    _say_where(study.folder)


def scaling(models: str, sizes: str | None, batch: int, rounds: int, folder: Path | None, json: bool) -> None:
    command = shlex.join(["vitlab", *sys.argv[1:]])
    asked = None if sizes is None else parse_numbers("--sizes", sizes)
    size: dict[str, Any] = dict(batch=batch, rounds=rounds)
    try:
        study = study_scaling(models, asked, **size, folder=folder, command=command, tell=say)
    except KeyboardInterrupt:
        say(f"vitlab: stopped. The rounds that were done are kept; the same command goes on: {command}")
        raise SystemExit(130) from None
    if json:
        print_json_text(to_json({"growth": [asdict(growth) for growth in study.growth], "measured": study.rows}))
    else:
        _print_plain([scaling_row(row) for row in study.rows], "model")
        out().print()
        _print_plain([display_growth(growth) for growth in study.growth], "model")
        out(markup=False).print(caption(study))
    for note in study.notes:
        say(f"note: {note}")
    _say_where(study.folder)


def data_efficiency(
    source: str,
    settings: list[str],
    models: str,
    fractions: str,
    seeds: int,
    path: str | None,
    folder: Path | None,
    json: bool,
) -> None:
    command = shlex.join(["vitlab", *sys.argv[1:]])
    shares = parse_numbers("--fractions", fractions, float)
    asked: dict[str, Any] = dict(seeds=seeds, settings=settings, folder=folder, command=command)
    try:
        with following_downloads(), OneBar() if sys.stdout.isatty() and not json else Beside() as show:
            study = study_data_efficiency(DataRecipe(source, path), models, shares, **asked, show=show)
    except (Stopped, KeyboardInterrupt):
        say(f"vitlab: stopped, and saved. The same command goes on: {command}")
        raise SystemExit(130) from None
    print_json_text(to_json(study.rows)) if json else _print_plain(efficiency_table(study.rows), "model")
    for note in study.notes:
        say(note)
    _say_where(study.folder)
    if study.failed:
        raise SystemExit(1)


def _say_where(folder: Path) -> None:
    drawn = folder / PLOT
    say(f"table: {folder / 'table.md'}" + (f"\nplot:  {drawn}" if drawn.is_file() else ""))


def _print_plain(rows: list[dict[str, Any]], left: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in rows[0]:
        table.add_column(title, justify="left" if title == left else "right")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    out().print(table)


def _print_ssl(study: SSLStudy) -> None:
    from rich.table import Table

    titles = {"knn": "k-NN", "linear_probe": "linear probe", "fine_tuned": "fine-tuned", "from_scratch": "from scratch"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"{study.labels:,} labels")
    for title in (*titles.values(), "gain"):
        table.add_column(title, justify="right")
    for row in study.rows:
        numbers = ["-" if row[key] is None else f"{row[key]:.2%}" for key in titles]
        gain = "-" if row["gain"] is None else f"{100 * row['gain']:+.2f}"
        table.add_row(row["method"], *numbers, gain)
    out().print(table)
    for note in study.notes:
        say(f"note: {note}")
    for method in study.failed:
        out(markup=False).print(f"{method.name}: {method.note}")


def _show(study: Study, format: str, json: bool) -> None:
    rows = study.rows
    if json:
        print_json_text(to_json(rows))
    elif format == "csv":
        print_plain(to_csv(rows), end="")
    elif format == "markdown":
        print_plain(to_markdown(display_rows(rows)), end="")
    else:
        _print_table(display_rows(rows))
    _say_where(study.folder)


def _print_table(rows: list[dict[str, Any]]) -> None:
    """The best in bold; a narrow terminal gets fewer columns, because table.md has them all."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    console = out()
    titles = {**TITLES, **short_keys([key for key in rows[0] if "." in key])}
    columns = {key: [titles.get(key, key), *[shown(key, row[key]) for row in rows]] for key in rows[0]}
    widths = {key: max(map(cell_len, texts)) + 2 for key, texts in columns.items()}
    widths["note"] = min(widths.get("note", 0), 20)  # it may be folded
    for key in SPARED:
        if sum(widths.values()) > console.width:
            widths[key] = 0
    grid = Table(box=None, pad_edge=False, header_style="bold")
    kept = [key for key in columns if widths[key]]
    for key in kept:
        numeric = all(isinstance(row[key], int | float | None) for row in rows)
        grid.add_column(Text(columns[key][0]), justify="right" if numeric else "left", overflow="fold")
    for number, row in enumerate(rows, 1):
        style = "bold" if BEST in row.get("note", "") else ""
        grid.add_row(*[Text(columns[key][number]) for key in kept], style=style)
    console.print(grid)


class OneBar(Bar):
    """For a terminal: the bar of the run that is going on; those before are told in words."""

    def start(self, done: int, total: int) -> None:
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
        super().start(done, total)
