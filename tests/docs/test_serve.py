"""docs/{en,zh}/serve.md: the code runs, commands and figures are the package's, both languages hold the same."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from vitlab.cli.main import app
from vitlab.search.table import CHUNK
from vitlab.serve.settings import FORMAT_NAMES, Settings

ROOT = Path(__file__).parents[2]
PAGES = {language: (ROOT / "docs" / language / "serve.md").read_text(encoding="utf-8") for language in ("en", "zh")}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_code_runs(tmp_path, monkeypatch, capsys):
    """Once: it is the same in both languages, as is tested below."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(PAGES["en"], "python"):
        exec(compile(block, "serve.md", "exec"), {})
        told = re.findall(r"print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == told and told


@pytest.mark.parametrize("language", PAGES)
def test_commands_have_the_options_that_are_shown(language):
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    found = 0
    for line in "\n".join(blocks(PAGES[language], "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if "vitlab" not in words:
            continue
        verb, *args = words[words.index("vitlab") + 1 :]
        verbs[verb].make_context(verb, args, resilient_parsing=False)
        found += 1
    assert found == 9


@pytest.mark.parametrize("language", PAGES)
def test_figures_are_those_of_the_code(language):
    limits = Settings()
    rows = dict(re.findall(r"^\|[^|]*\| `(--[a-z-]+)` \| ([\d.]+) \|", PAGES[language], re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == {
        "--max-batch": limits.max_batch,
        "--max-wait-ms": 1e3 * limits.max_wait,
        "--queue": limits.queue,
        "--timeout": limits.timeout,
        "--max-upload-mb": limits.max_upload / 1e6,
        "--max-megapixels": limits.max_pixels / 1e6,
    }
    fixed = re.findall(r"^\|[^|]*\| \| (\d+) \|", PAGES[language], re.MULTILINE)  # limits without an option
    expected = (limits.uploads, limits.max_connections, limits.header_seconds, limits.write_seconds)
    assert [float(value) for value in fixed] == [*expected, limits.linger_seconds]
    options = {o for p in get_command(app).commands["serve"].params for o in p.opts}  # type: ignore[attr-defined]
    assert set(rows) <= options
    assert limits.drain == 0.5 and re.search("half a second|半秒", PAGES[language])
    assert str(CHUNK) in PAGES[language]
    for kind in re.findall(r"\w+", FORMAT_NAMES.replace(" or ", " ")):
        assert kind in PAGES[language]


def test_paths_and_counters_are_those_of_the_server():
    from vitlab.serve.app import create_app
    from vitlab.serve.model_pool import open_models

    app = create_app(open_models(["bundled:digits"]))
    paths = set(app.openapi()["paths"]) | {"/docs", "/openapi.json"}
    counters = {metric.name for metric in app.state.metrics.registry.collect()}
    for text in PAGES.values():
        assert set(re.findall(r"`(?:POST |GET )(/\w+)`", text)) <= paths
        assert {name.removesuffix("_total") for name in re.findall(r"`(vitlab_\w+)`", text)} <= counters


def test_both_languages_hold_the_same():
    for language in ("python", "bash", "nginx"):
        plain = [[re.sub(r"\s*#.*", "", block) for block in blocks(text, language)] for text in PAGES.values()]
        assert plain[0] == plain[1] and plain[0]
    headings = [re.findall(r"^#+ ", text, re.MULTILINE) for text in PAGES.values()]
    assert headings[0] == headings[1]
    prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in PAGES.values()]
    code = [sorted(re.findall(r"`([^`\n]+)`", text)) for text in prose]
    assert code[0] == code[1]
    tables = [re.findall(r"^\|", text, re.MULTILINE) for text in prose]
    assert tables[0] == tables[1]
