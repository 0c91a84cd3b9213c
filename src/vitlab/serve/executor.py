"""The one thread that runs all models.

OpenMP, under torch, keeps a team of threads for every thread that has ever computed. When the teams outnumber the
cores they sleep at every barrier, and a small model takes 1.5 times as long. So one thread loads and runs all models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_executor = ThreadPoolExecutor(1, thread_name_prefix="vitlab-compute")


def compute(function: Callable[..., Result], *args: object) -> Result:
    """Run and wait. Deadlocks if called from a job."""
    return _executor.submit(function, *args).result()


async def compute_async(function: Callable[..., Result], *args: object) -> Result:
    return await asyncio.wrap_future(_executor.submit(function, *args))
