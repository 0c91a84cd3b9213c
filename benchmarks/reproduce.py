"""Write docs/{en,zh}/reproduce.md's table, sections and plots from the folder that `vitlab reproduce all` made.

    vitlab reproduce all
    python benchmarks/reproduce.py reproduce

benchmarks/reproduce.json holds the values; tests compare the pages with it. A claim that was not run in this folder
keeps the values and the plot that it has.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from vitlab.language import Language
from vitlab.study.reproduce.result import Result, read_result, report, summary
from vitlab.study.reproduce.run import stored_results
from vitlab.study.study import PLOT

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks" / "reproduce.json"
PICTURES = ROOT / "docs" / "pictures" / "reproduce"
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
LANGUAGES: tuple[Language, ...] = ("en", "zh")


def measured(results: list[Result], language: Language) -> str:
    """The part of the page that is generated: the table, then a section for each claim that was run."""
    sections = [
        report(result, language, f"../pictures/reproduce/{result.claim.name}.png", heading="###")
        for result in results
        if result.values
    ]
    return "\n".join([summary(results, language), *sections])


def read_stored() -> list[Result]:
    return [read_result(contents) for contents in json.loads(STORED.read_text(encoding="utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of vitlab reproduce")
    folder = parser.parse_args().folder
    new = stored_results(folder)
    before = {result.claim.name: result for result in read_stored()}
    results = [result if result.values else before.get(result.claim.name, result) for result in new]
    contents = json.dumps([result.to_dict() for result in results], indent=1, ensure_ascii=False)
    STORED.write_text(contents + "\n", encoding="utf-8")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for result in new:
        if result.values:
            shutil.copy(folder / result.claim.name / PLOT, PICTURES / f"{result.claim.name}.png")
    for language in LANGUAGES:
        page = ROOT / "docs" / language / "reproduce.md"
        text = page.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        part = f"{BEGIN}\n\n{measured(results, language)}\n{END}"
        page.write_text(before + part + after, encoding="utf-8")


if __name__ == "__main__":
    main()
