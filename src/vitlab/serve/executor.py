"""The one thread in which all models compute.

OpenMP, under torch, keeps a team of threads for every thread that has ever computed. As soon as the teams together
outnumber the cores, they all go to sleep at every barrier, and a small model takes half as long again. So models are
loaded here, and run here, one batch after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_thread = ThreadPoolExecutor(1, thread_name_prefix="vitlab-compute")


def compute(work: Callable[..., Result], *args: object) -> Result:
    """Not from within such work: it would wait for itself."""
    return _thread.submit(work, *args).result()


async def computed(work: Callable[..., Result], *args: object) -> Result:
    return await asyncio.wrap_future(_thread.submit(work, *args))
