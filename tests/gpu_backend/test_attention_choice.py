"""Which library reads the sequences: order, refusals, what a run says and what it times."""

import sys
from types import ModuleType

import pytest
import torch

from echo_policies.errors import InputError
from gpu_backend.attention import ATTENTION_NAME
from gpu_backend.prefix_backends import choice, flashinfer
from gpu_backend.prefix_backends.choice import BACKENDS, Attention, choose_attention
from gpu_backend.run_timing import time_run
from gpu_backend.sampling import Sampling
from gpu_backend.serve_config import make_serve_config
from gpu_backend.serve_prepare import describe_attention, try_attention
from gpu_backend.serve_setup import Workload
from tests.gpu_backend import fake_attention
from tests.gpu_backend.eagle3.heads import head_config, head_pair, tiny_head
from tests.gpu_backend.fake_attention import FAKES, num_calls
from tests.gpu_backend.serve import calibrated, make_engine, make_pair, requests, serve

NAMES = tuple(FAKES)
MODULES = {backend.name: backend.module for backend in BACKENDS}
CUDA, HALF = torch.device("cuda"), torch.bfloat16
WARM = Sampling(temperature=0.8, top_p=0.95)
ASKED = requests([[5, 9, 11, 5, 9], [7], [20, 21, 22, 23, 24, 25, 26, 27, 28]], 9)


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of compute capability 9.0, as far as anybody asks; no library."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for module in MODULES.values():
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def install(hopper, monkeypatch):
    """Makes libraries importable."""

    def installed(*names):
        for name in names:
            monkeypatch.setitem(sys.modules, MODULES[name], FAKES[name]())

    return installed


@pytest.fixture
def without_gpu(install, monkeypatch):
    """All libraries, usable where the models are."""
    install(*NAMES)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 2**20)
    monkeypatch.setattr(choice, "_objection", lambda *_: None)
    return {name: sys.modules[module] for name, module in MODULES.items()}


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (NAMES, "fa3"),
        (("flashinfer", "fa2"), "flashinfer"),
        (("fa2",), "fa2"),
        ((), "torch"),
    ],
)
def test_auto_takes_the_first_that_imports(install, names, first):
    install(*names)
    chosen = choose_attention("auto", CUDA, HALF, 128)
    assert chosen.name == first
    absent = [name for name in NAMES if name not in names]
    assert list(chosen.passed_over) == [
        f"{name} would need the module {MODULES[name]}"
        for name in absent
        if first == "torch" or NAMES.index(name) < NAMES.index(first)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_taken_at_its_word(install, name):
    install(*NAMES)
    assert choose_attention(name, CUDA, torch.float16, 64).name == name
    assert choose_attention("torch", CUDA, HALF, 64).name == "torch"


@pytest.mark.parametrize(
    ("model", "capability", "chosen"),
    [
        ((torch.device("cpu"), HALF, 128), (9, 0), "torch"),
        ((CUDA, torch.float32, 128), (9, 0), "torch"),
        ((CUDA, HALF, 128), (10, 0), "flashinfer"),
        ((CUDA, HALF, 128), (8, 6), "flashinfer"),
        ((CUDA, HALF, 96), (8, 0), "fa2"),
        ((CUDA, HALF, 12), (9, 0), "torch"),
        ((CUDA, HALF, 512), (9, 0), "torch"),
        ((CUDA, HALF, 128), (7, 5), "torch"),
    ],
)
def test_auto_passes_over_what_cannot_be_used(install, monkeypatch, model, capability, chosen):
    install(*NAMES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_attention("auto", *model).name == chosen


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_cannot_be_used_is_refused(install, monkeypatch, name):
    def sentence(device=CUDA, dtype=HALF, head_dim=128):
        with pytest.raises(InputError) as refused:
            choose_attention(name, device, dtype, head_dim)
        said = str(refused.value)
        assert said.startswith(f"attention: {name} needs ")
        assert said.endswith(". Use --attention auto or torch.")
        return said

    assert f"needs the module {MODULES[name]}; it cannot be imported (" in sentence()
    install(*NAMES)
    assert "needs a CUDA device; the model runs on cpu" in sentence(device=torch.device("cpu"))
    said = sentence(dtype=torch.float32)
    assert "needs float16 or bfloat16 (--dtype); the model's arithmetic is float32" in said
    assert "needs a head dimension " in sentence(head_dim=12)
    assert "; the model's is 12." in sentence(head_dim=12)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "needs a GPU of compute capability " in sentence()
    assert "; this one has 7.5." in sentence()


def test_a_head_dimension_is_looked_at_when_it_is_known(install):
    install("flashinfer")
    assert choose_attention("flashinfer", CUDA, HALF).name == "flashinfer"
    with pytest.raises(InputError, match="a head dimension of 64, 128 or 256; the model's is 96"):
        choose_attention("flashinfer", CUDA, HALF, 96)


def test_versions_that_lack_what_is_called_are_refused(hopper, monkeypatch):
    """Kind: a TypeError in the first forward, for the beta of a library takes other arguments."""
    old = ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", old)
    with pytest.raises(InputError, match="flash_attn_with_kvcache; the installed version lacks it"):
        choose_attention("fa3", CUDA, HALF)
    old.flash_attn_with_kvcache = lambda q, k_cache, v_cache, cache_seqlens=None: None
    with pytest.raises(InputError, match="takes page_table; the installed version does not"):
        choose_attention("fa3", CUDA, HALF)
    assert choose_attention("auto", CUDA, HALF).name == "torch"


def test_a_library_that_does_not_load_is_passed_over_or_named(install, monkeypatch):
    """Kind: a wheel built for another torch, whose import fails with an undefined symbol."""
    install("fa2")
    original = choice.importlib.import_module

    def broken(name):
        if name == "flash_attn_interface":
            raise OSError("undefined symbol:\n _ZN3c10")
        return original(name)

    monkeypatch.setattr(choice.importlib, "import_module", broken)
    assert choose_attention("auto", CUDA, HALF).name == "fa2"
    with pytest.raises(InputError, match=r"\(undefined symbol: _ZN3c10\)"):
        choose_attention("fa3", CUDA, HALF)


def test_nothing_is_imported_that_is_not_asked_for(install, monkeypatch):
    install(*NAMES)
    asked = []
    original = choice.importlib.import_module
    monkeypatch.setattr(
        choice.importlib, "import_module", lambda name: asked.append(name) or original(name)
    )
    choose_attention("torch", CUDA, HALF, 128)
    choose_attention("auto", torch.device("cpu"), HALF, 128)
    assert asked == []
    choose_attention("flashinfer", CUDA, HALF, 128)
    assert asked == ["flashinfer"]


@pytest.fixture(scope="module")
def truth():
    pair = make_pair(draft="close")
    return {
        (spec, rule): serve(make_engine(pair, spec, ASKED, sampling=rule), ASKED)
        for spec in SPECS
        for rule in (Sampling(), WARM)
    }


SPECS = ("autoregressive", "chain:levels=4", "eagle3:levels=3,top_k=3,nodes=8", "echo")


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_gives_the_tokens_of_torch(without_gpu, truth, name, spec):
    pair = make_pair(draft="close")
    for rule in (Sampling(), WARM):
        engine = make_engine(pair, spec, ASKED, sampling=rule, attention=name)
        assert serve(engine, ASKED) == truth[spec, rule]
    assert num_calls(without_gpu[name]) > 0
    others = [each for each in NAMES if each != name]
    assert not any(num_calls(without_gpu[each]) for each in others)


@pytest.mark.parametrize("name", NAMES)
def test_a_head_drafts_with_it_too(without_gpu, name):
    pair = head_pair(tiny_head(head_config(head_dim=16), attention=ATTENTION_NAME))
    spec = "eagle3:levels=3,top_k=3,nodes=8"
    expected = serve(make_engine(pair, spec, ASKED), ASKED)
    assert serve(make_engine(pair, spec, ASKED, attention=name), ASKED) == expected
    target_layers = pair.target.config.num_hidden_layers
    assert num_calls(without_gpu[name]) % target_layers, "the head's one layer shows"


def config(**options):
    return make_serve_config(
        {},
        policies=("chain",),
        target="t",
        prompts=("p.jsonl",),
        max_new_tokens=4,
        **options,
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_timed_is_what_runs(without_gpu, name):
    """Kind: a k_max from the forwards of another attention than the run's."""
    pair = make_pair(draft="close")
    policies = [calibrated("chain:levels=2")]
    workload = Workload((), tuple(ASKED))
    timed = time_run(config(attention=name), pair, policies, workload, 2, writes_costs=True)
    assert timed.costs.draft is not None
    layers = sum(model.config.num_hidden_layers for model in (pair.target, pair.draft))
    assert num_calls(without_gpu[name]) >= layers
    assert not any(num_calls(without_gpu[each]) for each in NAMES if each != name)


def said_of_a_run(name, pair):
    return describe_attention(*try_attention(name, pair), pair.target.device)


def test_a_run_says_what_it_used(without_gpu, monkeypatch):
    pair = make_pair(draft="close")
    assert said_of_a_run("auto", pair) == "fa3"
    assert said_of_a_run("fa2", pair) == "fa2"
    assert said_of_a_run("torch", pair) == "torch"
    monkeypatch.undo()
    assert said_of_a_run("auto", pair) == "torch"
    with pytest.raises(InputError, match="attention: fa2 needs a CUDA device"):
        try_attention("fa2", pair)


def test_a_run_says_it_of_target_and_draft_where_they_differ(without_gpu, monkeypatch):
    pair = make_pair(draft="close")
    pair.draft.config.head_dim = 12
    monkeypatch.setattr(
        choice, "_objection", lambda b, _, __, dim: ("x", "y") if dim == 12 else None
    )
    assert said_of_a_run("auto", pair) == "target fa3, draft torch"


def test_a_run_says_what_it_would_have_preferred_only_on_a_gpu():
    torch_alone = Attention(None, None, ("fa3 would need x", "fa2 would need y"))
    on_gpu = describe_attention(torch_alone, torch_alone, CUDA)
    assert on_gpu == "torch; fa3 would need x; fa2 would need y"
    assert describe_attention(torch_alone, torch_alone, torch.device("cpu")) == "torch"


@pytest.mark.parametrize("name", NAMES)
def test_a_library_that_answers_otherwise_than_torch_is_refused(without_gpu, monkeypatch, name):
    """Kind: an installed version whose kernels are not what its documentation says."""
    pair = make_pair(draft="close")
    original = fake_attention.softmax_rows

    def sees_one_too_many(query, keys, values, scale, *, causal):
        return original(query, keys, values, scale, causal=causal and len(query) == 1)

    assert [chosen.name for chosen in try_attention(name, pair)] == [name, name]
    monkeypatch.setattr(fake_attention, "softmax_rows", sees_one_too_many)
    with pytest.raises(InputError, match=f"attention: {name} must answer as torch does"):
        try_attention(name, pair)


@pytest.mark.parametrize("name", NAMES)
def test_a_library_that_fails_is_refused_in_a_sentence(without_gpu, monkeypatch, name):
    """Kind: kernels that are compiled at the first call, without a compiler."""

    def fails(*_, **__):
        raise RuntimeError("nvcc not found\n  at jit.py")

    monkeypatch.setattr(fake_attention, "softmax_rows", fails)
    with pytest.raises(InputError, match=f"{name} must run .* RuntimeError: nvcc not found at jit"):
        try_attention("auto" if name == "fa3" else name, make_pair(draft="close"))
