"""vitlab serve."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vitlab.cli.console import say, warnings_as_notes
from vitlab.errors import UsageError
from vitlab.printable import one_line


def run(
    models: list[str], index: Path | None, port: int, access_log: bool, threads: int | None, options: dict[str, Any]
) -> None:
    try:
        from vitlab.serve.run import open_server
        from vitlab.serve.settings import Settings
    except ImportError as error:
        raise UsageError(f"serve needs {error.name}, which is not installed: pip install 'vitlab[serve]'.") from None
    with warnings_as_notes():
        server = open_server(models, index, port=port, settings=Settings(**options), threads=threads)
    with server:
        if not server.settings.local and server.settings.token is None:
            say(f"note: whoever reaches {server.address} may ask. Add --token TOKEN, or leave out --host.")
        logging.basicConfig(level=logging.INFO if access_log else logging.ERROR, format="%(asctime)s %(message)s")
        for served in server.models:
            say(f"{served.name}: {', '.join(served.verbs)}")
        if server.index is not None:
            for note in server.index.notes:
                say(f"note: {one_line(note)}")
            about = server.index.summary()
            how = "words or a picture" if server.index.reads_text else "a picture"
            say(f"search: {about['pictures']:,} pictures of {about['name']}, with {how}, by {server.index.model}")
        place = f"http://{server.address}"
        say(f"vitlab: open {place}/ in a browser; {place}/docs tells how to ask. Ctrl-C ends.")
        server.run(access_log=access_log)
    say("vitlab: all that was accepted is answered.")
