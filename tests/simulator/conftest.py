"""A small random trace on disk, shared by the tests of the simulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.traces.build import Sizes, random_trace
from traces.schema import Trace
from traces.store import save

SIZES = Sizes(
    levels=5,
    beam_width=4,
    root_width=8,
    top_k=4,
    chain_levels=8,
    min_tokens=8,
    max_tokens=30,
)


@pytest.fixture(scope="session")
def trace() -> Trace:
    return random_trace(np.random.default_rng(11), 12, SIZES)


@pytest.fixture(scope="session")
def trace_file(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "small.safetensors"
    save(trace, path)
    return path
