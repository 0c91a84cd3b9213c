"""What all tests share: a fixed seed, two threads, and small models."""

from __future__ import annotations

import os

# Some virtual machines report AMX and do not let it be used: torch then dies of an illegal instruction in bfloat16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
