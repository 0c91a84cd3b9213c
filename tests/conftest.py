"""What all tests share: a fixed seed, two threads, and small models."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
