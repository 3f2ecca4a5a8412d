"""Which way is chosen, and that what is missing, or answers wrongly, changes no result."""

import pytest
import torch
from plain import Case, attention
from torch.testing import assert_close

from instances import normal
from xentflow.kernels import attend, dispatch, fused, matmul

MANY, FEW = 2048, 64


def operands(S, F=8, dtype=torch.float32, G=None):
    q = torch.zeros(1, S, F, dtype=dtype)
    return q, q, None, torch.zeros(1, S, F if G is None else G, dtype=dtype)


@pytest.fixture
def kernel():
    """The cache of the private kernel, empty before and after."""
    fused.cpu_kernel.cache_clear()
    yield fused._CPU_KERNEL
    fused.cpu_kernel.cache_clear()


def choice(q, k, u, v, mask, backend):
    return dispatch.choose(q, k, u, v, mask, backend)


def doubled(monkeypatch, answer):
    monkeypatch.setattr(matmul, "is_doubled", lambda A: answer)


def test_few_logits_are_formed():
    few, many = operands(FEW)[0], operands(MANY)[0]
    assert dispatch.choose_plain(few, few, "auto")
    assert not dispatch.choose_plain(many, many, "auto")
    assert not dispatch.choose_plain(few, few, "chunked")
    assert dispatch.choose_plain(many, many, "reference")


def test_a_gpu_forms_more():
    assert dispatch.are_few(2**25, torch.device("cuda"))
    assert not dispatch.are_few(2**25, torch.device("cpu"))


@pytest.mark.skipif(fused.cpu_kernel() is None, reason="torch has no fused kernel here")
def test_many_go_to_the_faster_of_two(monkeypatch):
    doubled(monkeypatch, False)
    assert choice(*operands(MANY), None, "auto") == "fused"
    assert choice(*operands(MANY, F=fused.WIDEST + 1), None, "auto") == "chunked"
    assert choice(*operands(MANY), None, "chunked") == "chunked"
    doubled(monkeypatch, True)
    assert choice(*operands(MANY), None, "auto") == "chunked"
    assert choice(*operands(MANY), None, "fused") == "fused"
    assert choice(*operands(dispatch.LONG + 1), None, "auto") == "fused"


def test_what_the_fused_kernel_cannot_do_goes_to_tiles(monkeypatch):
    doubled(monkeypatch, False)
    q, k, _, v = operands(MANY)
    mask = torch.ones(1, MANY, MANY, dtype=torch.bool)
    for backend in ("auto", "fused"):
        assert choice(q, k, None, v, mask, backend) == "chunked"
        assert choice(q, k, q, v, None, backend) == "chunked"
        assert choice(*operands(MANY, G=9), None, backend) == "chunked"
        assert choice(*operands(MANY, dtype=torch.complex64), None, backend) == "chunked"


# torch says of its own switch that another one is for other processors.
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_oneDNN_is_for_single_precision_on_wide_registers(monkeypatch):
    single = torch.zeros(1, 2, 2)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert matmul.is_doubled(single) == torch.backends.mkldnn.is_available()
    assert not matmul.is_doubled(single.double())
    with torch.backends.mkldnn.flags(enabled=False):
        assert not matmul.is_doubled(single)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not matmul.is_doubled(single)


@pytest.mark.parametrize("rows", [33, 64])
@pytest.mark.parametrize("convolves", [True, False])
def test_products_of_matrices_by_either_library(convolves, rows, generator, monkeypatch):
    seen = []
    monkeypatch.setattr(matmul, "WORTHWHILE", 0 if convolves else 2**60)
    monkeypatch.setattr(matmul, "is_doubled", lambda A: seen.append(1) or True)
    A, B, e = (normal(shape, generator).float() for shape in ((1, rows, 24), (1, 40, 24), (1, rows, 40)))
    bias = normal((1, 40), generator).float()
    bias[0, 3] = -torch.inf
    N = torch.einsum("nrf,ncf->nrc", A, B)
    for found, expected in (
        (matmul.nt(A, B), N),
        (matmul.nt(A, B, bias), N + bias[:, None]),
        (matmul.nt(A, B, turned=True), N),
        (matmul.nt(A, B, bias, turned=True), N + bias[:, None]),
        (matmul.nn(e, B), torch.einsum("nrc,ncf->nrf", e, B)),
        (matmul.tn(e, A), torch.einsum("nrc,nrf->ncf", e, A)),
    ):
        assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert bool(seen) == convolves


@pytest.mark.parametrize("rows", [33, 64])
def test_turned_the_fewer_rows_are_the_filters_and_what_is_large_is_read_as_it_lies(rows, generator, monkeypatch):
    monkeypatch.setattr(matmul, "WORTHWHILE", 0)
    monkeypatch.setattr(matmul, "is_doubled", lambda A: True)
    filters, pixels = [], []
    as_filters, as_pixels = matmul._filters, matmul._pixels
    monkeypatch.setattr(matmul, "_filters", lambda B: filters.append(len(B[0])) or as_filters(B))
    monkeypatch.setattr(matmul, "_pixels", lambda A: pixels.append(as_pixels(A)) or pixels[-1])
    A, B = normal((1, rows, 24), generator).float(), normal((1, 40, 24), generator).float()
    e = matmul.nt(A, B, turned=True)
    expected = torch.einsum("nrf,ncf->nrc", A, B)
    for found, right in (
        (e, expected),
        (matmul.nn(e, B), torch.einsum("nrc,ncf->nrf", expected, B)),
        (matmul.tn(e, A), torch.einsum("nrc,nrf->ncf", expected, A)),
    ):
        assert_close(found, right, rtol=1e-5, atol=1e-4)
    assert set(filters) == {min(rows, 40)}
    assert {image.data_ptr() for image in pixels} <= {A.data_ptr(), B.data_ptr(), e.data_ptr()}


def wrong(*args, **kwargs):
    q = args[0]
    return torch.zeros_like(q), q.new_zeros(q.shape[:-1])


def refusing(*args, **kwargs):
    raise RuntimeError("expected a signature of another release")


@pytest.mark.parametrize("stand_in", [None, wrong, refusing], ids=["missing", "wrong", "changed"])
def test_without_the_private_kernel_results_are_the_same(stand_in, kernel, generator, monkeypatch):
    monkeypatch.setattr(dispatch, "FEW", 0)
    case = Case(*(normal((2, n, 3), generator) for n in (7, 9, 9)), normal((2, 9), generator))
    before = attend(*case.arguments, "fused")
    fused.cpu_kernel.cache_clear()

    class Aten:
        def __getattr__(self, name):
            if name == kernel and stand_in is None:
                raise AttributeError(name)
            return stand_in if name == kernel else getattr(torch.ops.aten, name)

    monkeypatch.setattr(fused, "_operators", Aten)
    assert fused.cpu_kernel() is None
    assert choice(*operands(MANY), None, "fused") == "chunked"
    after = attend(*case.arguments, "fused")
    assert_close(after, before, rtol=1e-12, atol=1e-13)
    assert_close(after, attention(case)[:2], rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*flex_attention.*:UserWarning")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_way_of_gpus_both_ways_round(biased, causal, generator, monkeypatch):
    """``flex_attention``, which gives its log-sum-exp on a CPU too where it is not compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(fused, "_flex", lambda: flex_attention)
    monkeypatch.setattr(fused, "_pass", fused._flexible)
    S = 8
    q, k = normal((2, S, 4), generator).float(), normal((2, S, 4), generator).float()
    bias = normal((2, S), generator).float() if biased else None
    own, other, R = fused.attend(q, k, q.sin(), k.cos(), bias, causal)
    tensors = (q, k, k.cos(), *([bias] if biased else []))
    O, exact_R, p = attention(Case(q, k, k, None, None, causal).at(*(X.double() for X in tensors)))
    assert_close(own.double(), O, rtol=1e-5, atol=1e-5)
    assert_close(R.double(), exact_R, rtol=1e-5, atol=1e-5)
    assert_close(other.double(), p.mT @ q.sin().double(), rtol=1e-5, atol=1e-5)
