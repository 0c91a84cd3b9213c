"""onnxruntime-web, which runs ONNX in a browser: fetched with npm when a page is built, and kept in the cache.

One version is pinned, with npm's own digest of its archive, so every build of a page ships the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from vitlab.errors import ExportError
from vitlab.images.sources.download import cache_dir

VERSION = "1.30.0"
INTEGRITY = "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
PACKAGE = f"onnxruntime-web@{VERSION}"
ARCHIVE = f"onnxruntime-web-{VERSION}.tgz"
FILES = (  # the smallest build: CPU only; on one thread it needs no special headers
    "ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
)
TIMEOUT = 300  # seconds, for 33 MB
LICENSE = f"""onnxruntime-web {VERSION}
Copyright (c) Microsoft Corporation

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
ELSEWHERE = (
    f"Or fetch it where npm works (npm pack {PACKAGE}), copy {ARCHIVE} here and add --runtime {ARCHIVE} to the command."
)


def runtime_files(archive: Path | None = None) -> list[Path]:
    """The files that a page needs, from the cache, else from `archive`, else from npm."""
    folder = cache_dir() / f"onnxruntime-web-{VERSION}"
    files = [folder / name for name in FILES]
    if archive is None and all(file.is_file() for file in files):
        return files
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".onnxruntime-web-") as temporary:
        unpacked = Path(temporary) / "files"
        _unpack(_check(archive or _download(Path(temporary))), unpacked)
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.replace(folder)
    return files


def npm() -> str | None:
    """Path of npm, or None."""
    return shutil.which("npm")


def _download(folder: Path) -> Path:
    program = npm()
    if program is None:
        raise ExportError(
            f"a page without a server runs on {PACKAGE}, which is fetched with npm, and there is no npm here: install "
            f"Node.js, which brings it. {ELSEWHERE}"
        )
    command = [program, "pack", PACKAGE, "--silent", "--pack-destination", str(folder)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, encoding="utf-8")
        problem = done.stderr.strip() or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"no answer within {TIMEOUT} seconds"
    archive = folder / ARCHIVE
    if not archive.is_file():
        last = [line for line in problem.splitlines() if line.strip()][-1]
        raise ExportError(f"npm cannot fetch {PACKAGE}: {last}. Is this machine online? {ELSEWHERE}")
    return archive


def _check(archive: Path) -> Path:
    try:
        digest = hashlib.sha512(archive.read_bytes()).digest()
    except OSError as error:
        raise ExportError(f"{archive}: cannot be read ({error.strerror}). {ELSEWHERE}") from None
    if f"sha512-{base64.b64encode(digest).decode()}" != INTEGRITY:
        raise ExportError(f"{archive}: is not {PACKAGE} as it was published: its digest differs. {ELSEWHERE}")
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(archive) as entries:
        for name in FILES:
            content = entries.extractfile(f"package/dist/{name}")
            assert content is not None  # the digest says what is in it
            with (folder / name).open("wb") as file:
                shutil.copyfileobj(content, file)
