"""A user's error is one line and exit code 2; a bug is a traceback, how to report it, and exit code 1."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vitlab.cli.console import BUG
from vitlab.errors import CheckpointError, UsageError


@pytest.fixture
def failing(command, monkeypatch):
    """`vitlab models`, whose function raises."""

    def call(error: BaseException, code: int) -> str:
        def fail(*_):
            raise error

        monkeypatch.setattr("vitlab.models.registry.list_models", fail)
        done = command("models", code=code)
        assert done.stdout == ""
        return done.stderr

    return call


@pytest.mark.parametrize("error", [UsageError("so not"), CheckpointError("so not"), OSError("so not")])
def test_what_a_user_can_mend_is_one_line(failing, error):
    assert failing(error, 2) == "vitlab: error: so not\n"


def test_the_system_says_which_file(failing):
    told = failing(PermissionError(13, "Permission denied", "weights.safetensors"), 2)
    assert told.startswith("vitlab: error: weights.safetensors: permission denied. Name another place")
    assert told.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("broken"), ValueError("broken"), KeyError("broken")])
def test_anything_else_is_a_bug(failing, error):
    told = failing(error, 1)
    assert told.startswith("Traceback (most recent call last):\n") and told.endswith(f"{BUG}\n")
    assert f"{type(error).__name__}: " in told and "in fail" in told


def test_a_usage_error_needs_no_torch():
    code = "import sys; sys.argv = ['vitlab', 'train', '--minuts', '3']\nfrom vitlab.cli.main import run\ntry: run()\n"
    code += "except SystemExit as end: sys.exit(3 if 'torch' in sys.modules else end.code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 2 and "--minutes" in done.stderr


def test_debugging_shows_the_traceback_of_a_users_error(monkeypatch):
    from vitlab.cli.console import reporting_errors

    monkeypatch.setenv("VITLAB_DEBUG", "1")
    with pytest.raises(UsageError, match="so not"), reporting_errors():
        raise UsageError("so not")


def test_warnings_are_notes_and_are_said_once(capsys):
    import warnings

    from vitlab.cli.console import warnings_as_notes

    with warnings_as_notes():
        for _ in range(2):
            warnings.warn("eps is assumed to be 1e-6", stacklevel=1)
    assert capsys.readouterr().err == "note: eps is assumed to be 1e-6\n"
