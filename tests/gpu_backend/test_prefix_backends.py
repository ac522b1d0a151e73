"""First passes by libraries of kernels, of which there are stand-ins here."""

import math
import sys
from functools import wraps

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.errors import InputError
from gpu_backend.kv_pool import KvPool
from gpu_backend.prefix_backends import choice, flashinfer
from gpu_backend.prefix_backends.choice import BACKENDS, choose_attention
from gpu_backend.ragged_pool import Branches, RaggedPool
from gpu_backend.ragged_rows import RaggedRows
from gpu_backend.sequence_pass import Padded
from tests.gpu_backend.fake_attention import FAKES, Empty, PagedWrapper, num_calls

NAMES = tuple(FAKES)
BY_NAME = {backend.name: backend for backend in BACKENDS}
CPU = torch.device("cpu")
SLOTS, LAYERS, DIM = 120, 2, 16


def make_pool(heads, seed, dtype=torch.float32):
    """A pool with something in every slot of every layer."""
    pool = KvPool(LAYERS, heads, DIM, num_slots=SLOTS, dtype=dtype, device=CPU)
    torch.manual_seed(seed)
    for layer in range(LAYERS):
        filled = torch.randn(2, heads, SLOTS, DIM).to(dtype)
        pool.write(layer, torch.arange(SLOTS), *filled.unbind())
    return pool


def maker(name, pool, queries):
    """What lays out forwards, over a stand-in."""
    return BY_NAME[name].lay_out(FAKES[name](), pool, queries * pool.num_heads)


@pytest.fixture(autouse=True, scope="module")
def small_workspace():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "WORKSPACE_BYTES", 2**20)
        yield


@st.composite
def batches(draw):
    """Requests: slots of their sequences, slots of their rows, and branches or None if causal."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    is_causal = draw(st.booleans())
    free = rng.permutation(SLOTS)
    requests = []
    for length, rows in draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=6)
    ):
        sequence, own, free = free[:length], free[length : length + rows], free[length + rows :]
        parents = [int(rng.integers(-1, row)) for row in range(rows)]
        requests.append((sequence, own, None if is_causal else branches_of(own, parents)))
    return requests


def branches_of(own, parents):
    """Slots of each row's branch, the row's own included, padded with -1."""
    paths = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), int(own[row])])
    width = max(map(len, paths))
    return np.array([[*path, *[-1] * (width - len(path))] for path in paths])


def visible(requests):
    """Slots that each row sees, the row's own included."""
    for sequence, own, branches in requests:
        for row in range(len(own)):
            above = own[: row + 1] if branches is None else branches[row][branches[row] >= 0]
            yield [*sequence, *above]


def rows_of(requests, pool, lay_out):
    """The layout of a forward over the requests."""
    is_causal = requests[0][2] is None
    seen = [np.concatenate([s, own]) if is_causal else s for s, own, _ in requests]
    ancestors = None
    if not is_causal:
        width = max(branches.shape[1] for _, _, branches in requests)
        ancestors = torch.from_numpy(
            np.concatenate(
                [
                    np.pad(b, ((0, 0), (0, width - b.shape[1])), constant_values=-1)
                    for _, _, b in requests
                ]
            )
        )
    return RaggedRows(
        pool=pool,
        write_R=torch.from_numpy(np.concatenate([own for _, own, _ in requests])),
        sequences=lay_out(seen, [len(own) for _, own, _ in requests], CPU, is_causal=is_causal),
        ancestors_RA=ancestors,
    )


def attend(rows, layer, query):
    """Attend with the keys and values that are in the rows' slots already."""
    keys, values = rows.pool.gather(layer, rows.write_R)
    return rows.attend(layer, query, keys.transpose(0, 1), values.transpose(0, 1))


def dense(requests, pool, layer, query_hgRd):
    """A softmax per row over exactly what it sees, in float64."""
    out = torch.zeros_like(query_hgRd, dtype=torch.float64)
    for row, slots in enumerate(visible(requests)):
        keys, values = (each.double() for each in pool.gather(layer, torch.tensor(slots)))
        scores = torch.einsum("hgd,shd->hgs", query_hgRd[:, :, row].double(), keys)
        out[:, :, row] = torch.einsum("hgs,shd->hgd", scores.softmax(-1), values)
    return out


EMPTY_ANSWERS = [(0.0, -math.inf), (0.0, math.inf), (math.nan, math.nan), (7.0, -3e4)]


@pytest.mark.parametrize("name", NAMES)
@given(
    batches(),
    st.tuples(st.integers(1, 2), st.integers(1, 3)),
    st.sampled_from(EMPTY_ANSWERS),
    st.booleans(),
)
def test_rows_attend_as_torch_does_and_to_exactly_what_they_see(
    name, requests, grouping, answer, transposed
):
    """Kind: logarithms to base 2, heads in another order, a mask aligned to the wrong corner."""
    heads, queries = grouping
    pool = make_pool(heads, 1)
    total = sum(len(own) for _, own, _ in requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Empty, "out", answer[0])
        patch.setattr(Empty, "lse", answer[1])
        library = rows_of(requests, pool, maker(name, pool, queries))
        torch_own = rows_of(requests, pool, Padded.of)
        for layer in range(LAYERS):
            query = torch.randn(heads, queries, total, DIM)
            if transposed:  # as a model has it: rows first in memory
                query = query.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
            found = attend(library, layer, query)
            assert found.shape == query.shape
            near = {"atol": 1e-5, "rtol": 1e-5}
            torch.testing.assert_close(found, attend(torch_own, layer, query), **near)
            torch.testing.assert_close(found.double(), dense(requests, pool, layer, query), **near)


@pytest.mark.parametrize("lengths", [(0, 3), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("answer", EMPTY_ANSWERS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_without_a_sequence_see_their_branch_alone(name, answer, lengths, monkeypatch):
    """Kind: a sum of nothing taken as it comes, which is +inf in FlashAttention 2."""
    monkeypatch.setattr(Empty, "out", answer[0])
    monkeypatch.setattr(Empty, "lse", answer[1])
    pool = make_pool(2, 1)
    starts = (0, 20)
    requests = [
        (np.arange(start, start + length), own, branches_of(own, [-1, 0, 0]))
        for start, length, own in zip(
            starts, lengths, (np.arange(50, 53), np.arange(60, 63)), strict=True
        )
    ]
    query = torch.randn(2, 3, 6, DIM)
    found = attend(rows_of(requests, pool, maker(name, pool, 3)), 0, query)
    expected = dense(requests, pool, 0, query)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@given(batches())
def test_first_passes_agree_with_torch_in_output_and_sum(name, requests):
    pool = make_pool(2, 1)
    seen = [sequence for sequence, _, _ in requests]
    counts = [len(own) for _, own, _ in requests]
    query = torch.randn(2, 3, sum(counts), DIM)
    given_out, given_lse = maker(name, pool, 3)(seen, counts, CPU, is_causal=False).attend(
        pool, 0, query
    )
    out, lse = Padded.of(seen, counts, CPU, is_causal=False).attend(pool, 0, query)
    assert given_lse.dtype == torch.float32
    torch.testing.assert_close(given_out, out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(given_lse, lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half(name, dtype):
    pool = make_pool(2, 1, dtype)
    requests = [(np.arange(5), np.array([5, 6]), None), (np.arange(20, 23), np.array([23]), None)]
    rows = rows_of(requests, pool, maker(name, pool, 3))
    query = torch.randn(2, 3, 3, DIM).to(dtype)
    found = attend(rows, 0, query)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), dense(requests, pool, 0, query), atol=0.03, rtol=0)


@pytest.fixture
def usable(monkeypatch):
    """Every backend importable and, although there is no GPU, usable."""
    fakes = {name: make() for name, make in FAKES.items()}
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, BY_NAME[name].module, module)
    monkeypatch.setattr(choice, "_objection", lambda *_: None)
    return fakes


def ragged_pool(attention, pads=None):
    pool = make_pool(2, 1)
    return pool, RaggedPool(
        pool, query_heads=4, role="target", block=None, pads=pads, attention=attention
    )


def branches(key, places, above):
    number = len(places)
    return Branches(
        key, np.zeros(number, dtype=np.int64), np.arange(number), np.array(places), np.array(above)
    )


@pytest.mark.parametrize("name", NAMES)
def test_chains_take_one_causal_pass_and_trees_two(name, usable, monkeypatch):
    pool, places = ragged_pool(name)
    for key in range(2):
        places.table.reserve(key, 20)
    first = places.continuing([0, 1], [5, 1])
    assert isinstance(first.rows, RaggedRows)
    assert not isinstance(first.rows.sequences, Padded)
    places.commit([0, 1], [5, 1])
    chain, root = branches(0, [0, 1], [[0, -1], [0, 1]]), branches(1, [0], [[0]])
    fork = branches(1, [0, 1, 2], [[0, -1], [0, 1], [0, 2]])
    one_pass, two_passes = places.branching([chain, root]), places.branching([chain, fork])
    assert one_pass.rows.ancestors_RA is None
    assert two_passes.rows.ancestors_RA is not None
    again = places.branching([chain, root])
    monkeypatch.setattr("gpu_backend.ragged_rows.ancestor_pass", None)
    query, key_hRd = torch.randn(2, 2, 3, DIM), torch.randn(2, 3, DIM)
    found = again.rows.attend(0, query, key_hRd, key_hRd)
    slots = [places.table.seen(0, 2), places.table.seen(1, 1)]
    requests = [(slots[0][:5], slots[0][5:], None), (slots[1][:1], slots[1][1:], None)]
    torch.testing.assert_close(
        found.double(), dense(requests, pool, 0, query), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_given_by_name_is_looked_for_beforehand(name, usable, monkeypatch):
    """Kind: a keyword that an older version lacks, found out in the first forward."""
    *owners, called = BY_NAME[name].entry.split(".")
    owner = getattr(usable[name], owners[0]) if owners else usable[name]
    original, named = getattr(owner, called), set()

    def watched(*args, **options):
        named.update(options)
        return original(*args, **options)

    watched.__wrapped__ = original
    monkeypatch.setattr(owner, called, watched)
    _, places = ragged_pool(name)
    places.table.reserve(0, 20)
    rows = places.continuing([0], [3]).rows
    rows.attend(0, torch.randn(2, 2, 3, DIM), *torch.randn(2, 2, 3, DIM).unbind())
    assert named == set(BY_NAME[name].keywords)


def test_a_forward_is_planned_once_for_all_layers(usable, monkeypatch):
    plans = []
    original = PagedWrapper.plan
    monkeypatch.setattr(
        PagedWrapper, "plan", wraps(original)(lambda *a, **b: plans.append(original(*a, **b)))
    )
    _, places = ragged_pool("flashinfer")
    places.table.reserve(0, 20)
    rows = places.continuing([0], [3]).rows
    for layer in range(LAYERS):
        rows.attend(layer, torch.randn(2, 2, 3, DIM), *torch.randn(2, 2, 3, DIM).unbind())
    assert len(plans) == 1
    assert num_calls(usable["flashinfer"]) == LAYERS


def test_a_plan_is_not_used_after_the_next_is_made(usable):
    """Kind: layers of one forward run on another's plan, which lives in the wrapper."""
    _, places = ragged_pool("flashinfer")
    places.table.reserve(0, 20)
    old = places.continuing([0], [3]).rows
    new = places.continuing([0], [3]).rows
    query, key_hRd = torch.randn(2, 2, 3, DIM), torch.randn(2, 3, DIM)
    new.attend(0, query, key_hRd, key_hRd)
    with pytest.raises(AssertionError, match="another forward was planned"):
        old.attend(0, query, key_hRd, key_hRd)


def test_sums_in_another_form_are_refused(usable):
    """Kind: FlashAttention before 2.6 pads them, [B, H, n]."""
    original = usable["fa2"].flash_attn_varlen_func

    def padded(*args, return_attn_probs=False, **options):
        out, lse, none = original(*args, return_attn_probs=True, **options)
        return out, lse[None], none

    usable["fa2"].flash_attn_varlen_func = padded
    padded.__wrapped__ = original
    _, places = ragged_pool("fa2")
    places.table.reserve(0, 20)
    rows = places.continuing([0], [3]).rows
    with pytest.raises(InputError, match=r"one per row and head, \[3, 4\]; .* Update it"):
        rows.attend(0, torch.randn(2, 2, 3, DIM), *torch.randn(2, 2, 3, DIM).unbind())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "trees"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_the_library_itself_agrees_with_torch(name, dtype, is_causal):
    """On a GPU: empty sequences, single rows and long ones, grouped queries, two layers."""
    device, dim = torch.device("cuda"), 64
    try:
        found = choose_attention(name, device, dtype, dim)
    except InputError as error:
        pytest.skip(str(error))
    pool = KvPool(2, 2, dim, num_slots=2000, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(3)
    for layer in range(2):
        filled = torch.randn(2, 2, 2000, dim, generator=generator, device=device, dtype=dtype)
        pool.write(layer, torch.arange(2000, device=device), *filled.unbind())
    order = np.random.default_rng(5).permutation(2000)
    counts = [3, 1, 6, 20, 1]
    lengths = [700, 1, 6, 300, 2] if is_causal else [700, 0, 6, 300, 0]
    ends = np.cumsum(lengths)
    seen = [order[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    passes = [
        make(seen, counts, device, is_causal=is_causal)
        for make in (found.lay_out(pool, 8), Padded.of)
    ]
    for layer in range(2):
        query = torch.randn(2, 4, 31, dim, generator=generator, device=device, dtype=dtype) / 8
        (out, lse), (torch_out, torch_lse) = (each.attend(pool, layer, query) for each in passes)
        torch.testing.assert_close(out, torch_out, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, torch_lse, atol=2e-2, rtol=2e-2)
