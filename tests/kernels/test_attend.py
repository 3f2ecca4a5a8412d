"""Softmax attention with its log-sum-exp, by every backend and on tiles that do not divide anything evenly."""

import pytest
import torch
from plain import Case, attention
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from instances import normal, relative_error
from xentflow import XentflowError
from xentflow.kernels import attend, tiles
from xentflow.kernels.reference import attend as plain_attend

LAST_PLACE = torch.finfo(torch.float32).eps
BACKENDS = ("reference", "chunked", "fused")
by_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.usefixtures("small_tiles")


def cases(generator, n=2, S=7, K=9, F=3, G=3):
    q, k, v = normal((n, S, F), generator), normal((n, K, F), generator), normal((n, K, G), generator)
    bias = normal((n, K), generator, 2.0)
    mask = torch.rand(n, S, K, generator=generator) < 0.6
    dead_row = mask.clone()
    dead_row[0, 2] = False
    lost_keys = bias.clone()
    # A whole tile of keys, and in the last sample all of them.
    lost_keys[0, 3:8] = -torch.inf
    lost_keys[-1] = -torch.inf
    wide = normal((n, K, G + 2), generator)
    return {
        "bare": Case(q, k, v),
        "bias": Case(q, k, v, bias),
        "mask": Case(q, k, v, None, mask),
        "mask and bias": Case(q, k, v, bias, mask),
        "causal": Case(q, k, v, None, None, True),
        "causal, biased and masked": Case(q, k, v, bias, mask, True),
        "rows without entries": Case(q, k, v, bias, dead_row),
        "keys without entries": Case(q, k, v, lost_keys),
        "values of another width": Case(q, k, wide, bias),
        "one token": Case(q[:, :1], k[:, :1], v[:, :1]),
    }


CASES = tuple(cases(torch.Generator()))
every = pytest.mark.parametrize("name", CASES)


@by_backend
@every
def test_is_the_plain_form(name, backend, generator):
    case = cases(generator)[name]
    O, R, _ = attention(case)
    found_O, found_R = attend(*case.arguments, backend)
    assert_close(found_O, O, rtol=1e-12, atol=1e-13)
    assert_close(found_R, R, rtol=1e-12, atol=1e-13)


@by_backend
@every
def test_derivatives_are_the_plain_forms(name, backend, generator):
    case = cases(generator)[name]
    O, R, _ = attention(case)
    of_O, of_R = normal(O.shape, generator), normal(R.shape, generator)

    def gradients(compute):
        leaves = case.leaves()
        O, R = compute(leaves)
        total = (O * of_O).sum() + (R.masked_fill(-torch.inf == R, 0) * of_R).sum()
        found = torch.autograd.grad(total, leaves.tensors, allow_unused=True)
        # The log-sum-exp knows no values, so those of dead keys may have no gradient at all.
        return [torch.zeros_like(X) if g is None else g for g, X in zip(found, leaves.tensors, strict=True)]

    expected = gradients(lambda leaves: attention(leaves)[:2])
    for mine, its in zip(gradients(lambda c: attend(*c.arguments, backend)), expected, strict=True):
        assert_close(mine, its, rtol=1e-11, atol=1e-12)


@by_backend
@pytest.mark.parametrize("name", ["mask and bias", "causal", "rows without entries"])
def test_gradcheck(name, backend, generator):
    case = cases(generator, n=1, S=5, K=6, F=2, G=2)[name]

    def finite(*tensors):
        O, R = attend(*case.at(*tensors).arguments, backend)
        return O, R[R.detach() > -torch.inf]

    leaves = case.leaves().tensors
    assert gradcheck(finite, leaves)
    assert gradgradcheck(finite, leaves)


@by_backend
def test_what_follows_a_row_without_entries_does_not_reach_it(backend, generator):
    """The log-sum-exp is −∞ there, and so may be its derivative."""
    leaves = cases(generator)["rows without entries"].leaves()
    _, R = attend(*leaves.arguments, backend)
    R.square().sum().backward()
    assert all(bool(X.grad.isfinite().all()) for X in (leaves.q, leaves.k, leaves.bias))


@pytest.mark.parametrize("backend", ["chunked", "fused"])
def test_leading_dimensions_broadcast(backend, generator):
    q, k = normal((2, 3, 7, 3), generator), normal((3, 9, 3), generator)
    bias, mask = normal((9,), generator), torch.rand(7, 9, generator=generator) < 0.7
    for given in (None, mask):
        O, R = attend(q, k, k.sin(), bias, given, False, backend)
        own, _, log_sum_exp = plain_attend(q, k, None, k.sin(), bias, given)
        assert_close((O, R), (own, log_sum_exp), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rise", [60.0, 300.0, 2000.0])
def test_logits_that_rise_from_tile_to_tile(rise, generator):
    """Beyond e⁸⁸ the first tile's maximum is no reference for the last, in float32."""
    q, k = normal((1, 5, 2), generator), normal((1, 12, 2), generator)
    # From the first key to the last, up by ``rise``, in one row of two only.
    q, k = (
        torch.cat([q, torch.tensor([1.0, 0, 1, 0, -1])[None, :, None]], -1),
        torch.cat([k, rise * torch.linspace(0, 1, 12, dtype=torch.float64)[None, :, None]], -1),
    )
    single = Case(q.float(), k.float(), k[..., :2].float())
    case = single.to(torch.float64)
    O, R, _ = attention(case)
    found = attend(*single.arguments, "chunked")
    scale = max(1.0, rise)
    assert_close(found[0].double(), O, rtol=0, atol=2e-6 * scale * float(O.abs().max()) / 10)
    assert_close(found[1].double(), R, rtol=1e-6, atol=1e-5)
    leaves = single.leaves()
    attend(*leaves.arguments, "chunked")[0].sum().backward()
    exact = case.leaves()
    attention(exact)[0].sum().backward()
    for mine, its in zip(leaves.tensors, exact.tensors, strict=True):
        assert float((mine.grad - its.grad).abs().max()) <= 1e-5 * scale * float(its.grad.abs().max())


@by_backend
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_loses_no_more_than_twice_what_plain_single_precision_loses(scale, backend, generator, monkeypatch):
    """On the same numbers; ``scale`` is the size of the logits. Many rows, as only those with near ties lose digits."""
    for name, size in (("TILE", 2**12), ("COLUMNS", 24), ("KEPT", 2**12)):
        monkeypatch.setattr(tiles, name, size)
    case = cases(generator, n=2, S=400, K=60, F=16, G=16)["bias"]
    case = Case(case.q * (scale / 4), case.k, case.v, case.bias)
    single = case.to(torch.float32)
    case = single.to(torch.float64)
    weights = normal((2, 400, 16), generator)

    def everything(case, compute):
        leaves = case.leaves()
        O, R = compute(leaves)
        return [O, R, *torch.autograd.grad((O * weights.to(O.dtype)).sum() + R.sum(), leaves.tensors)]

    def textbook(case):
        N = case.q @ case.k.mT + case.bias[:, None]
        return torch.softmax(N, -1) @ case.v, torch.logsumexp(N, -1)

    exact = everything(case, lambda c: attention(c)[:2])
    naive = everything(single, textbook)
    found = everything(single, lambda c: attend(*c.arguments, backend))
    for mine, its, true in zip(found, naive, exact, strict=True):
        # Or than one unit in the last place.
        assert relative_error(mine, true) <= max(2 * relative_error(its, true), LAST_PLACE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["chunked", "fused"])
def test_half_precision_comes_back_as_it_came(dtype, backend, generator):
    case = cases(generator)["bias"].to(dtype)
    O, R = attend(*case.arguments, backend)
    assert O.dtype == dtype
    assert R.dtype == torch.float32
    expected = attention(case.to(torch.float64))
    assert relative_error(O.double(), expected[0]) < 5 * torch.finfo(dtype).eps
    assert relative_error(R.double(), expected[1]) < 5 * torch.finfo(dtype).eps
    leaves = case.leaves()
    attend(*leaves.arguments, backend)[0].sum().backward()
    assert all(X.grad.dtype == dtype for X in leaves.tensors)


def test_autocast_lowers_no_precision(generator):
    case = cases(generator)["bias"].to(torch.float32)
    expected = attend(*case.arguments, "chunked")
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(attend(*case.arguments, "chunked"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["chunked", "fused", "auto"])
def test_torch_func_goes_through(backend, generator):
    case = cases(generator)["bias"]

    def summed(q, k, v, bias):
        return attend(q, k, v, bias, None, False, backend)[0].sum()

    found = torch.func.grad(summed, argnums=(0, 1, 2, 3))(*case.tensors)
    leaves = case.leaves()
    expected = torch.autograd.grad(attention(leaves)[0].sum(), leaves.tensors)
    assert_close(found, expected, rtol=1e-11, atol=1e-12)
    one_by_one = torch.vmap(lambda q: attend(q, case.k[0], case.v[0], backend=backend)[0])(case.q)
    assert_close(one_by_one[1], attend(case.q[1], case.k[0], case.v[0])[0], rtol=1e-12, atol=1e-13)


def test_an_unknown_backend_is_refused(generator):
    case = cases(generator)["bare"]
    with pytest.raises(XentflowError, match="backend: expected one of auto, reference, chunked, fused, got 'fast'"):
        attend(*case.arguments, "fast")
