"""vitlab reproduce: claims of the papers, tried here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, print_json, print_plain, print_table, say
from vitlab.cli.options import Format, Json, Settings, argument, folder_option
from vitlab.cli.progress import following_downloads
from vitlab.cli.runs import check_format
from vitlab.cli.train import ProgressBar, StderrLines
from vitlab.errors import UsageError
from vitlab.language import Language, language

if TYPE_CHECKING:
    from vitlab.study.reproduce.claim import Claim
    from vitlab.study.reproduce.result import Result

EVERY = "all"


def reproduce(
    name: Annotated[
        str | None, argument("NAME|all", "A claim, or all of them. Default: the list of claims.", complete.claims)
    ] = None,
    settings: Settings = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each: seeds 0, 1, ...")] = 3,
    listed: Annotated[bool, typer.Option("--list", help="List the claims, and run nothing.")] = False,
    dir: Annotated[Path | None, folder_option("reproduce")] = None,
    format: Format = "table",
    json: Json = False,
) -> None:
    """Try the papers' claims here: what holds at this size?

    Each claim has a rule that was written before it was run. Minutes on one thread each, on the digits in the package;
    data.path=cifar-10-binary.tar.gz uses CIFAR-10. After an interruption the same command continues.
    """
    from vitlab.study.reproduce.claims import CLAIMS, find_claim
    from vitlab.study.reproduce.run import stored_results

    check_format(format)
    if name is not None and "=" in name:
        raise UsageError(f"{name!r} is a setting: name a claim before it, or all. Claims: {', '.join(CLAIMS)}.")
    shown_format = "json" if json else format
    claims = list(CLAIMS.values()) if name in (None, EVERY) else [find_claim(name)]
    if name is not None and not listed:
        results = _run(claims, settings or [], seeds, dir, on_screen=shown_format == "table")
    else:
        names = [claim.name for claim in claims]
        results = [result for result in stored_results(dir) if result.claim.name in names]
    _print(results, shown_format, language(), single=name not in (None, EVERY) and not listed)
    if name is None and shown_format == "table":
        say("Run one: vitlab reproduce NAME; or all: vitlab reproduce all")


def _run(claims: list[Claim], settings: list[str], seeds: int, folder: Path | None, *, on_screen: bool) -> list[Result]:
    from vitlab.study.reproduce.run import FOLDER, REPORT, reproduce
    from vitlab.training.loop import Stopped

    results = []
    try:
        with following_downloads(), ProgressBar() if on_screen and sys.stdout.isatty() else StderrLines() as show:
            for claim in claims:
                show.note(f"{claim.name}: {claim.title[language()]}")
                results.append(reproduce(claim, folder, seeds=seeds, settings=settings, language=language(), show=show))
    except (Stopped, KeyboardInterrupt):
        say(f"vitlab: stopped, and saved. The same command continues: {shlex.join(['vitlab', *sys.argv[1:]])}")
        raise SystemExit(130) from None
    for claim in claims:
        say(f"report: {(folder or FOLDER) / claim.name / REPORT}")
    return results


def _print(results: list[Result], format: str, lang: Language, *, single: bool) -> None:
    from vitlab.study.reproduce.result import criteria, csv_rows, headline, overview, report, summary
    from vitlab.study.study import as_table
    from vitlab.training.runs import to_csv

    if format == "json":
        dicts = [result.to_dict() for result in results]
        print_json(dicts[0] if single else dicts)
    elif format == "csv":
        print_plain(to_csv([row for result in results for row in csv_rows(result)]), end="")
    elif format == "markdown":
        print_plain(report(results[0], lang, None) if single else summary(results, lang), end="")
    elif single:
        console().print(headline(results[0], lang), style="bold")
        print_table(as_table(criteria(results[0], lang)))
    else:
        print_table(as_table(overview(results, lang)))
