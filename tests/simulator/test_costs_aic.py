"""Kernel times from AIConfigurator's tables: a small copy of their layout, and the real ones."""

import importlib.util

import numpy as np
import pytest

from echo_policies.errors import InputError, MissingExtraError, UnknownNameError
from simulator.cost import aic_tables
from simulator.cost.aic_tables import pyarrow_reader
from simulator.cost.kernels_aic import open_aic_kernels
from simulator.cost.models import Experts

INSTALLED = all(importlib.util.find_spec(p) for p in ("aiconfigurator_core", "pyarrow"))
SHAPES = Experts(count=128, per_token=8, ffn=1536)


def columns(names, *rows):
    return {
        n: list(values) for n, values in zip(names.split(), zip(*rows, strict=True), strict=True)
    }


GEMM = columns(
    "kernel_source gemm_dtype m n k latency",
    *(
        ("torch", "bfloat16", m, n, k, 0.003 + 1e-10 * m * n * k)
        for m in (1, 64)
        for n in (1024, 4096)
        for k in (1024, 4096)
    ),
    ("a", "fp8", 1, 1024, 1024, 0.006),
    ("b", "fp8", 1, 1024, 1024, 0.008),
    ("c", "fp8", 1, 1024, 1024, 0.100),
)
ATTENTION = "kernel_source batch_size isl num_heads num_key_value_heads head_dim attn_dtype"
ATTENTION += " kv_cache_dtype step window_size latency"
GENERATION = columns(
    ATTENTION,
    *(
        (kernel, b, 1, 32, 8, 128, "bfloat16", "bfloat16", step, 0, slow * (0.01 + 1e-6 * b * step))
        for kernel, slow in (("fa3", 1.0), ("triton", 5.0))
        for b in (1, 8)
        for step in (1023, 4095)
    ),
    ("triton", 1, 1, 64, 8, 128, "bfloat16", "bfloat16", 1023, 0, 9.0),
)
CONTEXT = columns(
    ATTENTION,
    *(("fa3", 1, t, 32, 8, 128, "bfloat16", "bfloat16", 0, 0, 1e-4 * t) for t in (16, 1024)),
)
MOE = columns(
    "kernel_source moe_dtype num_tokens hidden_size inter_size topk num_experts moe_tp_size"
    " moe_ep_size distribution latency",
    *(
        ("triton", "bfloat16", t, 4096, 1536, 8, 128, 8, 1, "power_law_1.2", 0.02 + 0.01 * t)
        for t in (1, 16)
    ),
)
REDUCE = columns(
    "kernel_source num_gpus message_size backend latency",
    *(("x", 8, n, "sglang_graph", 1e-6 * n) for n in (1024, 4096)),
    ("x", 8, 1024, "sglang_eager", 0.03),
)
FILES = {
    "gemm/sglang/0.5.6.post2/gemm_perf": GEMM | {"latency": [1.0] * len(GEMM["m"])},
    "gemm/sglang/0.5.14/gemm_perf": GEMM,
    "attention/sglang/0.5.14/generation_attention_perf": GENERATION,
    "attention/sglang/0.5.14/context_attention_perf": CONTEXT,
    "moe/sglang/0.5.14/moe_perf": MOE,
    "moe/sglang/0.5.14.post1/moe_perf": MOE | {"hidden_size": [1024, 1024]},
    "comm/sglang/0.5.14/custom_allreduce_perf": REDUCE,
}


@pytest.fixture
def folder(tmp_path):
    for name in FILES:
        path = tmp_path / "h100_sxm" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


@pytest.fixture
def small(folder):
    def read(path):
        name = path.relative_to(folder / "h100_sxm").with_suffix("").as_posix()
        return {column: np.asarray(cells) for column, cells in FILES[name].items()}

    return lambda **options: open_aic_kernels(folder=folder, read=read, **options)


def test_gemm_own_points_and_between(small):
    kernels = small()
    assert kernels.gemm_s(64, 4096, 1024) == (0.003 + 1e-10 * 64 * 4096 * 1024) / 1e3
    between = (0.003 + 1e-10 * 32 * 2048 * 3072) / 1e3
    assert kernels.gemm_s(32, 2048, 3072) == pytest.approx(between)


def test_median_over_kernels_and_number_types(small):
    assert small(dtype="fp8").gemm_s(1, 1024, 1024) == pytest.approx(8e-6)
    with pytest.raises(InputError, match="gemm_dtype was measured at bfloat16, fp8"):
        small(dtype="int4").gemm_s(1, 1024, 1024)


def test_the_newest_version_unless_one_is_named(small):
    assert small(version="0.5.6.post2").gemm_s(1, 1024, 1024) == pytest.approx(1e-3)
    with pytest.raises(UnknownNameError, match=r"Did you mean '0.5.14'"):
        small(version="0.5.15").gemm_s(1, 1024, 1024)


def test_an_older_version_where_the_newest_has_not_the_shape(small):
    kernels = small()
    assert kernels.moe_s(1, 4096, SHAPES, tp=8) == pytest.approx(30e-6)
    assert kernels.sources() == ["sglang 0.5.14 moe_perf"]
    with pytest.raises(
        InputError, match=r"sglang 0.5.14.post1 .* hidden_size was measured at 1024"
    ):
        small(version="0.5.14.post1").moe_s(1, 4096, SHAPES, tp=8)
    with pytest.raises(InputError, match=r"sglang 0.5.14.post1 .* no kernel with"):
        kernels.moe_s(1, 2048, SHAPES, tp=8)


def test_decode_attention_takes_fa3_and_the_context_with_the_new_token(small):
    kernels = small()
    assert kernels.decode_attention_s(8, 4096, 32, 8) == pytest.approx((0.01 + 8e-6 * 4095) / 1e3)
    with pytest.raises(InputError, match=r"num_heads was measured at 32. Choose one"):
        kernels.decode_attention_s(8, 4096, 64, 8)  # only triton has it


def test_prefill_attention_moe_and_all_reduce(small):
    kernels = small()
    assert kernels.prefill_attention_s(1, 520, 32, 8) == pytest.approx(52e-6)
    assert kernels.moe_s(6, 4096, SHAPES, tp=8) == pytest.approx(80e-6)
    assert kernels.all_reduce_s(2 * 2048, 8) == pytest.approx(2048e-9)
    assert kernels.all_reduce_s(2 * 2048, 1) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: k.gemm_s(65, 4096, 1024), "sglang 0.5.14 gemm_perf covers rows 1 to 64"),
        (lambda k: k.gemm_s(1, 1024, 512), r"input width 1024 to 4096 \(at rows 1, output width"),
        (lambda k: k.moe_s(6, 1024, SHAPES, tp=4), "moe_tp_size was measured at 8"),
        (lambda k: k.moe_s(17, 4096, SHAPES, tp=8), "covers tokens 1 to 16"),
        (lambda k: k.all_reduce_s(4096, 4), "num_gpus was measured at 8"),
        (lambda k: k.all_reduce_s(2, 8), "covers elements 1024 to 4096"),
    ],
)
def test_what_was_not_measured_is_refused(call, message, small):
    with pytest.raises(InputError, match=message):
        call(small())


def test_names_that_do_not_exist(small, folder):
    with pytest.raises(UnknownNameError, match="No engine with kernel tables named 'vlm'"):
        small(engine="vlm")
    with pytest.raises(UnknownNameError, match="Did you mean 'h100_sxm'"):
        small(system="h100-sxm")
    with pytest.raises(UnknownNameError, match="No system"):
        open_aic_kernels(folder=folder / "absent", read=lambda _: {})
    with pytest.raises(InputError, match="must hold gemm_perf of vllm; they do not"):
        small(engine="vllm").gemm_s(1, 1024, 1024)


def test_another_layout_is_refused(folder):
    kernels = open_aic_kernels(folder=folder, read=lambda _: {"m": np.ones(1)})
    with pytest.raises(
        InputError, match=r"the column 'n'; it has m. Install aiconfigurator-core=="
    ):
        kernels.gemm_s(1, 1024, 1024)


@pytest.mark.parametrize("missing", ["aiconfigurator_core", "pyarrow"])
def test_a_missing_extra_is_named(missing, folder, monkeypatch):
    monkeypatch.setattr(aic_tables, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'echo-spec\[aiconfigurator\]'"):
        open_aic_kernels(folder=folder if missing == "pyarrow" else None)


def test_parquet_files_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table(REDUCE), path)
    got = pyarrow_reader()(path)
    assert {name: cells.tolist() for name, cells in got.items()} == REDUCE


@pytest.mark.skipif(not INSTALLED, reason="needs the extra [aiconfigurator]")
def test_the_installed_wheel():
    kernels = open_aic_kernels()
    # hardware.md section 4.2: the fitted operators at points of their tables.
    assert kernels.gemm_s(1, 6144, 4096) == pytest.approx(21.4e-6, rel=0.15)
    assert kernels.all_reduce_s(2 * 8 * 4096, 8) == pytest.approx(4.8e-6, rel=0.05)
    assert kernels.decode_attention_s(64, 2048, 32, 8) == pytest.approx(196e-6, rel=0.2)
    assert 0.0 < kernels.moe_s(8, 4096, SHAPES, tp=8) < kernels.moe_s(512, 4096, SHAPES, tp=8)
