"""Tiny models are fastest on one thread: several only wait for each other."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
