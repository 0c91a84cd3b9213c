"""What breaks on Windows or macOS alone: encodings left to the system, POSIX modules, paths compared as text, forks."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = sorted(file for folder in ("src", "tools") for file in (ROOT / folder).rglob("*.py"))
SCRIPTS = sorted(file for folder in ("benchmarks", "examples", "tests") for file in (ROOT / folder).rglob("*.py"))
TEXT = {"read_text": 0, "write_text": 1}  # method: position of its encoding
POSIX_MODULES = {"fcntl", "grp", "posix", "pwd", "resource", "select", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "os": {
        "O_NOFOLLOW", "O_NONBLOCK", "fchmod", "fork", "forkpty", "getegid", "geteuid", "getgid", "getloadavg",
        "getpgid", "getuid", "killpg", "mkfifo", "mknod", "nice", "pread", "register_at_fork", "sched_getaffinity",
        "sched_setaffinity", "setsid", "statvfs", "sysconf", "uname", "wait4", "waitpid",
    },
    "signal": {
        "SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm", "setitimer",
    },
}  # fmt: skip
MODULES = {"io", "codecs", "gzip", "lzma", "bz2", "os"}  # their open(path, mode)
SUBPROCESS = {"run", "Popen", "check_output"}
OPENERS = {"open", "fdopen", "NamedTemporaryFile"}
SEARCHES = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "rfind", "find"}
LOOKED_AT = {"str", "get_context", *TEXT, *OPENERS, *SUBPROCESS, *SEARCHES}


def problems(source: str) -> list[str]:
    """Lines of a module that would behave otherwise on another system."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))

    @cache
    def parents() -> dict[ast.AST, ast.AST]:
        return {child: node for node in nodes for child in ast.iter_child_nodes(node)}

    def around(node: ast.AST) -> Iterator[ast.AST]:
        while node in parents():
            node = parents()[node]
            yield node

    def guarded(node: ast.AST) -> bool:
        """Inside `try`, or below a test of the platform or of the attribute."""
        tests = [outer.test for outer in around(node) if isinstance(outer, ast.If | ast.IfExp)]
        return any(isinstance(outer, ast.Try) for outer in around(node)) or any(
            word in ast.unparse(test) for test in tests for word in ("hasattr", "platform", "os.name")
        )

    found = []
    for node in nodes:
        if isinstance(node, ast.Call):
            if problem := of_call(node):
                found.append((node.lineno, f"{ast.unparse(node)}: {problem}"))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if POSIX_MODULES & set(names) and not guarded(node):
                found.append((node.lineno, f"imports {', '.join(names)}, which Windows has not"))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            absent = node.attr in POSIX_NAMES.get(node.value.id, ())
            if absent and not guarded(node):
                found.append((node.lineno, f"{node.value.id}.{node.attr} is not there on Windows"))
    return [f"{line}: {problem}" for line, problem in sorted(found)]


def of_call(call: ast.Call) -> str:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if not {name, method} & LOOKED_AT:
        return ""
    receiver = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    first = call.args[0] if call.args else None
    unnamed = "encoding" not in keywords
    if method in TEXT and len(call.args) <= TEXT[method] and unnamed and receiver != "super()":
        return "names no encoding"
    if name == "open" or method in OPENERS:
        mode = mode_of(call, keywords, 0 if method == "open" and receiver not in MODULES else 1)
        if mode is not None and "b" not in mode and unnamed:
            return "names no encoding"
    if method in SUBPROCESS and {"text", "universal_newlines"} & set(keywords) and unnamed:
        return "names no encoding"
    if name == "str" and first is not None and ".relative_to(" in ast.unparse(first):
        return "has backslashes on Windows; use as_posix()"
    separator = isinstance(first, ast.Constant) and "/" in str(first.value)
    if separator and method in SEARCHES and ("str(" in receiver[:4] or "os.path" in receiver):
        return "has backslashes on Windows; use as_posix()"
    if method == "get_context" and isinstance(first, ast.Constant) and first.value == "fork":
        return "only POSIX forks"
    return ""


def mode_of(call: ast.Call, keywords: dict, position: int) -> str | None:
    """The mode of a call that opens a file; None for other functions of that name, such as Image.open(path)."""
    mode = keywords.get("mode", call.args[position] if len(call.args) > position else None)
    if isinstance(mode, ast.Constant) and isinstance(mode.value, str):
        return mode.value if set(mode.value) <= set("rwxabt+") else None
    of_path = not call.args and set(keywords) <= {"buffering", "encoding", "errors", "newline"}
    opens_file = isinstance(call.func, ast.Name) or (call.func.attr == "open" and of_path)
    return "r" if mode is None and opens_file else None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("path.read_text()", "names no encoding"),
        ("path.write_text(t, 'utf-8')", ""),
        ("open(path)", "names no encoding"),
        ("path.open()", "names no encoding"),
        ("path.open('w')", "names no encoding"),
        ("path.open('wb')", ""),
        ("tempfile.NamedTemporaryFile()", ""),
        ("Image.open(path)", ""),
        ("tabs.open(width=300)", ""),
        ("subprocess.run(x, text=True)", "names no encoding"),
        ("import fcntl", "which Windows has not"),
        ("try:\n    import fcntl\nexcept ImportError:\n    fcntl = None", ""),
        ("signal.signal(signal.SIGHUP, f)", "is not there on Windows"),
        ("if hasattr(os, 'fork'):\n    os.fork()", ""),
        ("str(path.relative_to(folder))", "use as_posix()"),
        ("str(path).split('/')", "use as_posix()"),
    ],
)
def test_the_check_sees_what_it_is_for(source, expected):
    lines = problems(source)
    assert (expected in lines[0]) if expected else not lines


def test_the_source_runs_anywhere():
    assert OURS
    assert not {str(file): lines for file in OURS if (lines := problems(file.read_text(encoding="utf-8")))}


def test_scripts_and_tests_name_the_encoding_of_their_files():
    found = {file: problems(file.read_text(encoding="utf-8")) for file in SCRIPTS}
    assert not {str(file): lines for file, lines in found.items() if any("no encoding" in line for line in lines)}


def test_names_differ_by_more_than_case_and_suit_windows():
    files = [
        file.relative_to(ROOT).as_posix()
        for folder in ("src", "recipes", "docs")
        for file in (ROOT / folder).rglob("*")
    ]
    files = [file for file in files if "__pycache__" not in file]
    assert len({file.casefold() for file in files}) == len(files)
    assert not [file for file in files if set('<>:"|?*\\') & set(file) or file.endswith((".", " "))]
    reserved = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}
    assert not [file for file in files if Path(file).stem.casefold() in reserved]
