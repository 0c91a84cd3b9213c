"""Packages that not every use of vitlab needs: which extra of `pip install 'vitlab[EXTRA]'` has them."""

from __future__ import annotations

from importlib.util import find_spec

from vitlab.errors import UsageError

EXTRAS = {  # the extras of pyproject.toml, with the names that are imported
    "compare": ("transformers",),
    "embed": ("pyarrow",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "masks": ("pycocotools",),
    "notebook": ("anywidget",),
    "plot": ("matplotlib",),
    "search": ("usearch",),
    "serve": ("fastapi", "prometheus_client", "python_multipart", "uvicorn"),
    "track": ("tensorboard", "wandb"),
}


def require(purpose: str, *packages: str, otherwise: str = "") -> None:
    """An error that names the first package that is not installed, and how to install it. Imports nothing.

    purpose      what needs it: "serve", "--plot"
    otherwise    what can be done without it, as a sentence
    """
    for package in packages:
        if find_spec(package) is None:
            raise UsageError(
                f"{purpose} needs {package}, which is not installed: {how_to_install(package)}. {otherwise}".rstrip()
            )


def how_to_install(package: str) -> str:
    return next(f"pip install 'vitlab[{extra}]'" for extra, names in EXTRAS.items() if package in names)


def missing_package(error: Exception) -> str:
    """The same message for a failed import of one of these packages; empty for any other error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not any(package in names for names in EXTRAS.values()):
        return ""
    return f"this needs {package}, which is not installed: {how_to_install(package)}."
