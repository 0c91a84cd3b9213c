"""vitlab serve."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vitlab.cli.console import say
from vitlab.errors import UsageError
from vitlab.printable import one_line


def run(
    models: list[str], index: Path | None, port: int, access_log: bool, threads: int | None, options: dict[str, Any]
) -> None:
    try:
        from vitlab.serve.app import create_app
        from vitlab.serve.run import listen, serve
    except ImportError as error:
        raise UsageError(f"serve needs {error.name}, which is not installed: pip install 'vitlab[serve]'.") from None
    import torch

    from vitlab.cli.predict import open_any
    from vitlab.serve.executor import compute
    from vitlab.serve.model_pool import open_models
    from vitlab.serve.search_index import open_index
    from vitlab.serve.settings import Settings

    settings = Settings(**options)
    if threads is not None:
        compute(torch.set_num_threads, threads)
    load = lambda source: open_any(source, None, None)
    served = compute(open_models, models, load)
    search_index = None if index is None else compute(open_index, index, served, load)
    with listen(settings.host, port) as listening:
        host, port = listening.getsockname()[:2]
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not settings.local and settings.token is None:
            say(f"note: whoever reaches {place} may ask. Add --token TOKEN, or leave out --host.")
        logging.basicConfig(level=logging.INFO if access_log else logging.ERROR, format="%(asctime)s %(message)s")
        for one in served:
            say(f"{one.name}: {', '.join(one.verbs)}")
        if search_index is not None:
            for note in search_index.notes:
                say(f"note: {one_line(note)}")
            about = search_index.summary()
            how = "words or a picture" if search_index.reads_text else "a picture"
            say(f"search: {about['pictures']:,} pictures of {about['name']}, with {how}, by {search_index.model}")
        say(f"vitlab: open http://{place}/ in a browser; http://{place}/docs tells how to ask. Ctrl-C ends.")
        serve(create_app(served, settings, search_index), listening, access_log=access_log)
    say("vitlab: all that was accepted is answered.")
