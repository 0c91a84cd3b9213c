"""vitlab learn as it is typed: the learner's file runs in a child process; crashes, endless loops and odd files."""

import json
import re
import sys
from pathlib import Path

import pytest

import vitlab.cli.main
from vitlab.language import language
from vitlab.learn.check import prepare
from vitlab.learn.child import examine
from vitlab.learn.exercises import EXERCISES, HERE, find, page_links
from vitlab.learn.grade import grade
from vitlab.learn.messages import _table
from vitlab.learn.mistakes import known_mistakes
from vitlab.learn.progress import NOTES, remember, states


def run(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["vitlab", "learn", *words])
    with pytest.raises(SystemExit) as stopped:
        vitlab.cli.main.run()
    printed = capsys.readouterr()
    return int(stopped.value.code or 0), printed.out, printed.err


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("VITLAB_LANG", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "C.UTF-8")


def test_a_learners_way(monkeypatch, capsys, tmp_path):
    """List, starter, not yet written, a mistake (in Chinese), right, done."""
    code, out, _ = run(monkeypatch, capsys)
    assert code == 0 and "Next: vitlab learn patch-embed" in out and out.count(" -\n") == 8
    code, out, _ = run(monkeypatch, capsys, "attention")
    file = tmp_path / "attention.py"
    assert code == 0 and file.is_file() and "vitlab learn attention attention.py" in out
    assert "http://127.0.0.1:8000/#step=scores" in out.splitlines()[-1]
    wrong = EXERCISES["attention"].solution().replace(" / d**0.5", "")
    file.write_text('print("my own words")\n' + wrong, encoding="utf-8")
    code, out, err = run(monkeypatch, capsys, "attention", "attention.py", "--lang", "zh")
    hint = next(m for m in known_mistakes("attention") if m.name == "no scale")
    assert code == 1 and hint.zh in out and "还没有通过" in out and err == "my own words\n"
    code, out, _ = run(monkeypatch, capsys, "attention", "--solution")
    file.write_text(out, encoding="utf-8")
    code, out, _ = run(monkeypatch, capsys, "attention", "attention.py")
    assert code == 0 and "right, on every size" in out and "Next: vitlab learn patch-embed" in out
    assert states(tmp_path)["attention"] == ("attention.py", "done")
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert states(tmp_path)["attention"] == ("attention.py", "changed")


def test_an_endless_loop_and_a_crash_end_with_a_word(monkeypatch, capsys):
    loop = (
        EXERCISES["mlp"]
        .solution()
        .replace("x = self.fc1(x)", "while True:\n            x = x + 0\n        x = self.fc1(x)")
    )
    Path("loop.py").write_text(loop, encoding="utf-8")
    code, out, _ = run(monkeypatch, capsys, "mlp", "loop.py", "--seconds", "1")
    assert code == 1 and "stopped after 1 s" in out
    line = next(n for n, text in enumerate(loop.splitlines(), 1) if "x + 0" in text)
    assert f"line {line}: x = x + 0" in out or f"line {line - 1}: while True:" in out
    Path("crash.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", encoding="utf-8")
    code, out, _ = run(monkeypatch, capsys, "mlp", "crash.py", "--json")
    found = json.loads(out)
    assert code == 1 and found["kinds"] == ["not passed", "crashed"] and "SIGSEGV" in found["lines"][1]


FORWARD = "        x = self.fc1(x)  # (B, N, hidden)\n        x = F.gelu(x)\n        return self.fc2(x)  # (B, N, D)\n"
ODD = [  # how the file differs, what is said of it, a part of the words
    (lambda c: c.replace("class MLP", "class Mlp"), "no class", "no class MLP; classes found: Mlp"),
    (lambda c: "MLP = 3\n", "no module", "class MLP(nn.Module)"),
    (lambda c: c.replace("def forward(", "def forward(("), "syntax", "is not valid Python"),
    (lambda c: "import not_there\n" + c, "import", "not_there"),
    (lambda c: "raise SystemExit(3)\n" + c, "import", "SystemExit"),
    (lambda c: c.replace("width: int, hidden: int", "width: int"), "signature", "MLP(width, hidden)"),
    (lambda c: c.replace("nn.Linear(width, hidden)", "nn.Linear(width, undefined)"), "init", "undefined"),
    (lambda c: c.replace("fc1", "first"), "names", "Missing in yours: fc1.weight, fc1.bias"),
    (lambda c: c.replace("nn.Linear(width, hidden)", "nn.Linear(width, hidden + 1)"), "weight shape", "45 x 15"),
    (lambda c: c.replace(FORWARD, "        raise NotImplementedError\n"), "to write", "forward is still to be written"),
    (lambda c: c.replace(FORWARD, "        self.fc1(x)\n"), "returns nothing", "None"),
    (lambda c: c.replace("return self.fc2(x)", "return [self.fc2(x)]"), "returns other", "list"),
    (lambda c: c.replace("def forward(self, x: Tensor)", "def forward(self)"), "forward", "TypeError"),
    (lambda c: c.replace("self.fc2(x)", "self.fc2(x.mT)"), "forward", "B=2, N=7, D=15, hidden=44"),
    (lambda c: c.replace("F.gelu(x)", "F.gelu(x) / 0"), "finite", "not numbers"),
]


@pytest.mark.parametrize(("change", "key", "said"), ODD, ids=[f"{n}: {key}" for n, (_, key, _) in enumerate(ODD)])
def test_odd_files_get_a_clear_word(change, key, said, tmp_path):
    code = EXERCISES["mlp"].solution()
    file = tmp_path / "mlp.py"
    file.write_text(change(code), encoding="utf-8")
    assert file.read_text(encoding="utf-8") != code
    verdict = grade(EXERCISES["mlp"], *examine(file, *prepare(EXERCISES["mlp"])))
    assert verdict.keys[1] == key and said in "\n".join(verdict.lines("en"))
    assert len(verdict.lines("zh")) == len(verdict.lines("en"))


def test_what_is_right_of_a_half_written_file_is_said(tmp_path):
    """Of two functions one is written: it is checked, and the other is named."""
    exercise = EXERCISES["positions"]
    cut = "first, patches = self.table[:, :1], self.table[:, 1:]"
    half = exercise.solution().replace(cut, "raise NotImplementedError")
    (tmp_path / "positions.py").write_text(half, encoding="utf-8")
    verdict = grade(exercise, *examine(tmp_path / "positions.py", *prepare(exercise)))
    assert verdict.keys == ["not passed", "right so far", "to write", "at"]
    assert "the first 2 of" in verdict.lines("en")[1] and verdict.lines("en")[2].startswith("resized is still")
    (tmp_path / "positions.py").write_text(half.replace("by_column.sin()", "by_row.sin()"), encoding="utf-8")
    verdict = grade(exercise, *examine(tmp_path / "positions.py", *prepare(exercise)))
    assert "difference" in verdict.keys and "to write" not in verdict.keys


def test_a_vector_of_another_length_is_named(tmp_path):
    code = (
        EXERCISES["block"].solution().replace("self.norm2 = nn.LayerNorm(width", "self.norm2 = nn.LayerNorm(2 * width")
    )
    (tmp_path / "block.py").write_text(code, encoding="utf-8")
    verdict = grade(EXERCISES["block"], *examine(tmp_path / "block.py", *prepare(EXERCISES["block"])))
    assert verdict.keys[1] == "weight shape" and "weight norm2.weight is 30 in your class" in verdict.lines("en")[1]


def test_a_hint_comes_before_the_error_that_it_explains(tmp_path):
    """The mean over the heads has d numbers a token, so proj stops; that they are averaged is measured."""
    code = EXERCISES["attention"].solution().replace("x.transpose(1, 2).reshape(B, N, D)", "x.mean(dim=1)")
    (tmp_path / "attention.py").write_text(code, encoding="utf-8")
    verdict = grade(EXERCISES["attention"], *examine(tmp_path / "attention.py", *prepare(EXERCISES["attention"])))
    assert verdict.keys == ["not passed", "mistake", "measured stop", "forward", "at", "sizes"]
    assert verdict.mistakes == ["heads averaged"]


def test_the_line_of_an_error_is_the_learners(tmp_path):
    code = EXERCISES["attention"].solution().replace("q @ k.transpose(-2, -1)", "q @ k")
    (tmp_path / "attention.py").write_text(code, encoding="utf-8")
    verdict = grade(EXERCISES["attention"], *examine(tmp_path / "attention.py", *prepare(EXERCISES["attention"])))
    line = next(n for n, text in enumerate(code.splitlines(), 1) if "q @ k" in text)
    assert f"in attention.py, line {line}: scores = q @ k" in "\n".join(verdict.lines("en"))


def test_a_starter_is_never_written_over(monkeypatch, capsys):
    Path("mlp.py").write_text("mine", encoding="utf-8")
    code, out, _ = run(monkeypatch, capsys, "mlp")
    assert code == 0 and Path("mlp.py").read_text(encoding="utf-8") == "mine" and "already here" in out
    assert states(Path())["mlp"] == ("mlp.py", "begun")
    code, out, _ = run(monkeypatch, capsys, "mlp", "--print", "--lang", "zh")
    assert out == EXERCISES["mlp"].starter("zh") and "练习 3/8" in out


def test_steps_of_the_page_belong_to_one_exercise_each(monkeypatch, capsys):
    links = page_links()
    steps = [step for link in links for step in (*link["steps"], link["panel"]) if step]
    assert len(steps) == len(set(steps)) and [link["exercise"] for link in links] == list(EXERCISES)
    for link in links:
        assert (link["panel"] is None) == bool(link["steps"])
        assert link["fragment"] in (f"#panel={link['panel']}", *(f"#step={step}" for step in link["steps"][:1]))
        assert find(link["command"].removeprefix("vitlab learn ")).name == link["exercise"]
    code, out, _ = run(monkeypatch, capsys, "--json")
    listed = json.loads(out)
    assert code == 0 and [{**row, "state": "open", "file": row["file"]} for row in listed] == listed
    assert [{key: row[key] for key in links[0]} for row in listed] == links


def test_wrong_names_and_files_are_refused(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "atention")
    assert code == 2 and "Did you mean attention?" in err
    code, _, err = run(monkeypatch, capsys, "mlp", "nowhere.py")
    assert code == 2 and "vitlab learn mlp writes a starter file" in err
    code, _, err = run(monkeypatch, capsys, "--lang", "fr")
    assert code == 2 and "use en or zh" in err
    assert find("patch_embed") is find("PATCH-EMBED")


def test_notes_that_are_broken_are_no_notes(tmp_path):
    (tmp_path / NOTES).write_text("[]", encoding="utf-8")
    assert {state for _, state in states(tmp_path).values()} == {"open"}
    file = tmp_path / "mine.py"
    file.write_text("x", encoding="utf-8")
    remember(EXERCISES["vit"], file)
    assert states(tmp_path)["vit"] == ("mine.py", "done")
    file.unlink()
    assert states(tmp_path)["vit"] == ("vit.py", "open")


@pytest.mark.parametrize("name", EXERCISES)
def test_starters_are_the_solution_without_what_is_to_be_written(name):
    """In both languages: the same code, which is the solution's, and the number and the paper of the exercise."""
    exercise, number = EXERCISES[name], list(EXERCISES).index(name) + 1
    bare = []
    for first in (f"Exercise {number} of {len(EXERCISES)}: ", f"练习 {number}/{len(EXERCISES)}："):
        text = exercise.starter("en" if first.startswith("E") else "zh")
        assert text.startswith(f'"""{first}') and f"vitlab learn {name} {exercise.file}" in text
        assert re.search(r"arXiv:\d{4}\.\d{5}", text)
        code = text.split('"""\n\n', 1)[1]
        bare.append([line.split("  # ")[0].rstrip() for line in code.splitlines()])
    assert bare[0] == bare[1] and bare[0][-1].strip() == "raise NotImplementedError"
    start = next(n for n, line in enumerate(bare[0]) if line.startswith("class "))
    given = [line for line in bare[0][start:] if line.strip() != "raise NotImplementedError"]
    solution = iter([line.split("  # ")[0].rstrip() for line in exercise.solution().splitlines()])
    assert all(line in solution for line in given)  # in this order


def test_both_languages_say_everything():
    for key, row in _table().items():
        for words in row.values() if key == "steps" else [row]:
            assert words.keys() == {"en", "zh"}
            fields = [{part.split(":")[0].split("}")[0] for part in words[k].split("{")[1:]} for k in ("en", "zh")]
            assert fields[0] == fields[1], key
    for exercise in EXERCISES.values():
        steps = {step for case in exercise.all_cases() for step in case.steps()}
        steps = {step.split(" ")[0] if step.startswith("block ") else step for step in steps}
        assert steps <= _table()["steps"].keys()
        assert exercise.titles.keys() == {"en", "zh"}
        assert all(any("一" <= letter <= "鿿" for letter in m.zh) for m in known_mistakes(exercise.name))
    assert {p.name for p in (HERE / "solutions").glob("*.py")} == {e.file for e in EXERCISES.values()}


def test_the_language_is_the_locales(monkeypatch):
    assert language() == "en" and language("zh") == "zh"
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert language() == "zh" and language("en") == "en"
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert language() == "en"
    monkeypatch.setenv("VITLAB_LANG", "zh")
    assert language() == "zh"
