"""What a step may touch: slots of its own requests, behind their sequences, by valid indices."""

import functools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_backend import serving, tree_layout, verifier
from gpu_backend.kv_slots import SlotTable
from tests.gpu_backend.serve import make_engine, make_pair, outputs, requests, serve, true_output
from tests.gpu_backend.tiny import VOCAB, tiny_model

TREE = "eagle3:levels=3,top_k=3,nodes=8"
SPECS = [TREE, "echo:levels=4,top_k=3", "chain:levels=3", "static:tree=0/1/00/01/000"]
INDEXED = {"index_select", "gather", "index_copy_", "scatter", "scatter_", "scatter_reduce"}


@pytest.fixture(scope="module")
def close():
    return make_pair(draft="close")


@pytest.fixture(scope="module")
def asked():
    rng = np.random.default_rng(6)
    return requests([rng.integers(2, VOCAB, size).tolist() for size in (3, 9, 1, 6)], [7, 3, 8, 5])


@pytest.fixture(scope="module")
def truth(asked):
    return {r.number: true_output(tiny_model(seed=1), r) for r in asked}


class Watched:
    """A pool, and which of its slots a step may write."""

    def __init__(self, model, generator):
        self.table, self.layers = model.table, model._places._pool._layers
        for layer in self.layers:
            layer.copy_(torch.randn(layer.shape, generator=generator) * 1e3)
        self.granted = set()
        original = self.table.reserve

        def reserve(key, capacity):
            done = original(key, capacity)
            self.granted |= set(self.table._slots[key].tolist()) if done else set()
            return done

        self.table.reserve = reserve

    def note(self):
        self.granted.clear()
        self.before = self.layers[0].clone()
        owned = [slots.tolist() for slots in self.table._slots.values()]
        self.free = set(range(self.table.num_slots)).difference(*owned)
        sequences = [self.table.seen(key).tolist() for key in self.table._slots]
        self.committed = set().union(*sequences)

    def check(self):
        is_changed = (self.layers[0] != self.before).any(0).flatten(1).any(1)
        changed = set(is_changed.nonzero()[:, 0].tolist())
        assert not (changed & self.free) - self.granted, "a slot without an owner was written"
        assert not changed & self.committed, "a committed token was overwritten"


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_writes_only_where_it_may(close, asked, truth, spec):
    """Kind: a row, a padding row above all, that writes into a slot of somebody else's.

    Every pool starts full of large numbers, so a slot that is read before it was written shows in
    the output. After every step a free slot and a committed token are as they were.
    """
    engine = make_engine(close, spec, asked, batch=3, pool_requests=2)
    generator = torch.Generator().manual_seed(0)
    models = (engine._verifier.target, engine.drafter.draft)
    pools = [Watched(model, generator) for model in models]
    for request in asked:
        engine.submit(request)
    while engine.has_work:
        for pool in pools:
            pool.note()
        engine.step()
        engine.check_integrity()
        for pool in pools:
            pool.check()
    assert outputs(engine) == truth


def rows_are_written_to_the_first_slots(patch):
    """Every row of a tree goes where the pool begins, whoever owns that."""
    original = SlotTable.spare

    def spare(self, key, count):
        return original(self, key, count) if self.length(key) == 0 else np.arange(count)

    patch.setattr(SlotTable, "spare", spare)


def test_a_row_in_a_slot_of_somebody_elses_is_noticed(close, asked, truth, monkeypatch):
    rows_are_written_to_the_first_slots(monkeypatch)
    # A slot outside the request's own block is noticed by the window already.
    with pytest.raises((AssertionError, IndexError), match=r"was (over)?written|out of bounds"):
        test_a_step_writes_only_where_it_may(close, asked, truth, TREE)


class ValidIndices(TorchDispatchMode):
    """Refuses an index below zero or beyond the end, wherever something is looked up by one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "embedding":
            self.check(name, args[1], args[0].shape[0])
        elif name in INDEXED:
            self.check(name, args[2], args[0].shape[args[1]])
        elif name in {"index", "index_put_"}:
            for axis, index in enumerate(args[1]):
                if index is not None and index.dtype == torch.int64:
                    self.check(name, index, args[0].shape[axis])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def check(name, index, size):
        if index.numel():
            low, high = int(index.min()), int(index.max())
            assert low >= 0, f"{name} by {low}"
            assert high < size, f"{name} by {high} of {size}"


def run_checked(pair, spec, asked, monkeypatch, *, pads):
    """Serve with every lookup checked, rows laid out as on a CPU or, padded, as on a GPU."""
    laid_out = functools.partial(serving.RaggedModel, pads=pads)
    monkeypatch.setattr(serving, "RaggedModel", laid_out)
    engine = make_engine(pair, spec, asked, batch=3)
    with ValidIndices():
        return serve(engine, asked)


@pytest.mark.parametrize("spec", SPECS)
def test_padding_never_reaches_a_lookup(close, asked, truth, spec, monkeypatch):
    """Kind: -1, the padding of ancestors, parents and token ids, used as an index."""
    for pads in (False, True):
        with monkeypatch.context() as patch:
            assert run_checked(close, spec, asked, patch, pads=pads) == truth


def test_padding_never_reaches_a_lookup_with_prompt_lookup(asked, truth, monkeypatch):
    pair = make_pair(draft="lookup")
    assert run_checked(pair, TREE, asked, monkeypatch, pads=False) == truth


def ancestors_are_not_clamped(patch):
    original = torch.Tensor.clamp_min
    patch.setattr(
        torch.Tensor,
        "clamp_min",
        lambda self, low: self if self.dtype == torch.int64 else original(self, low),
    )


def a_padding_token_is_kept(patch):
    original = tree_layout.lay_out

    def lay_out(*args):
        tree = original(*args)
        tree.tokens_n[1:][-1:] = -1
        return tree

    patch.setattr(verifier, "lay_out", lay_out)


@pytest.mark.parametrize("fault", [ancestors_are_not_clamped, a_padding_token_is_kept])
def test_a_padding_index_is_noticed(close, asked, fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="by -1"):
        run_checked(close, TREE, asked, monkeypatch, pads=True)


def spare_slots_are_not_given_back(patch):
    """Slots of rejected nodes stay with a request that has left."""

    original = SlotTable.release

    def release(self, key):
        self._slots[key] = self._slots[key][: self.length(key)]
        original(self, key)

    patch.setattr(SlotTable, "release", release)


def rejected_slots_are_kept(patch):
    """A rejected node's slot is cut out of the request's slots and goes nowhere."""
    original = SlotTable.commit

    def commit(self, key, rows):
        start, count = self._length[key], len(rows)
        original(self, key, rows)
        rejected = start + count
        if count and len(self._slots[key]) > rejected:
            self._slots[key] = np.delete(self._slots[key], rejected)

    patch.setattr(SlotTable, "commit", commit)


@pytest.mark.parametrize("fault", [spare_slots_are_not_given_back, rejected_slots_are_kept])
def test_a_leaked_slot_is_noticed(close, asked, fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="a slot leaked"):
        serve(make_engine(close, TREE, asked, batch=3), asked)
