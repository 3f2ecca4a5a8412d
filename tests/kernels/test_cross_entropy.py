"""ℓ over logits that are never formed, and its gradients, against ℓ written out in float64."""

import pytest
import torch
from plain import cross_entropies, one_hot
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from instances import normal, relative_error
from xentflow.kernels import Problem, cross_entropy, fused, tiles
from xentflow.kernels.loss import sweep

BACKENDS = ("reference", "chunked", "fused")
LAST_PLACE = torch.finfo(torch.float32).eps
by_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.usefixtures("small_tiles")


def problems(generator, n=2, S=7, K=9, F=3):
    """Problems and the targets they stand for."""
    q, k = normal((n, S, F), generator), normal((n, K, F), generator)
    bias = normal((n, K), generator)
    labels = torch.randint(K, (n, S), generator=generator)
    soft = normal((n, S, K), generator).softmax(-1)
    # Labels take part, and one row has nothing that does but its label, one nothing at all.
    mask = (torch.rand(n, S, K, generator=generator) < 0.5).scatter(-1, labels.unsqueeze(-1), True)
    mask[0, 1] = False
    mask[0, 1, labels[0, 1]] = True
    dead = mask.clone()
    dead[0, 3] = False
    found = {
        "labels": (Problem(q, k, None, None, labels, None), one_hot(labels, K)),
        "labels and bias": (Problem(q, k, bias, None, labels, None), one_hot(labels, K)),
        "shared keys": (Problem(q, k[:1], bias[:1], None, labels, None), one_hot(labels, K)),
        "labels and mask": (Problem(q, k, bias, mask, labels, None), one_hot(labels, K)),
        "rows without entries": (Problem(q, k, bias, dead, labels, None), one_hot(labels, K)),
        "smoothed": (Problem(q, k, bias, None, labels, None, 0.3), one_hot(labels, K, 0.3)),
        "smoothed and masked": (Problem(q, k, bias, dead, labels, None, 0.3), one_hot(labels, K, 0.3, dead)),
        "soft": (Problem(q, k, bias, None, None, soft), soft),
        "one class": (Problem(q, k[:, :1], None, None, torch.zeros_like(labels), None), torch.ones(n, S, 1).double()),
    }
    masked = soft * dead
    masked = masked / masked.sum(-1, keepdim=True).clamp_min(1e-30)
    found["soft and masked"] = (Problem(q, k, bias, dead, None, masked), masked)
    return found


PROBLEMS = tuple(problems(torch.Generator()))
every = pytest.mark.parametrize("name", PROBLEMS)


def expected_of(problem, C, q, k, bias):
    n = len(q)
    shared = bias if bias is None else bias.expand(n, -1)
    return cross_entropies(q, k.expand(n, -1, -1), C, shared, problem.mask)


def rebuilt(problem, q, k, bias=None):
    return Problem(q, k, bias, problem.mask, problem.labels, problem.targets, problem.smoothing)


def leaves_of(problem):
    given = [X for X in (problem.q, problem.k, problem.bias) if X is not None]
    return [X.clone().requires_grad_() for X in given]


@by_backend
@every
@pytest.mark.parametrize("summed", [True, False])
def test_value_and_gradients_are_those_of_the_plain_form(summed, name, backend, generator):
    problem, C = problems(generator)[name]
    weights = normal(problem.q.shape[:2], generator)
    mine, its = leaves_of(problem), leaves_of(problem)
    q, k, *b = its
    exact = expected_of(problem, C, q, k, b[0] if b else None)
    if summed:
        found = cross_entropy(rebuilt(problem, *mine), weights, backend)
        assert_close(found, (weights * exact).sum(), rtol=1e-12, atol=1e-12)
        total = 3 * found
    else:
        found = cross_entropy(rebuilt(problem, *mine), None, backend)
        assert_close(found, exact, rtol=1e-12, atol=1e-12)
        total = 3 * (weights * found).sum()
    gradients = torch.autograd.grad(total, mine)
    assert_close(gradients, torch.autograd.grad(3 * (weights * exact).sum(), its), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("wanted", range(1, 8))
def test_gradients_that_nobody_wants_change_no_other(wanted, generator):
    problem, _ = problems(generator)["labels and bias"]
    weights = normal(problem.q.shape[:2], generator)
    every = leaves_of(problem)
    all_of_them = torch.autograd.grad(cross_entropy(rebuilt(problem, *every), weights, "chunked"), every)
    for backend in ("chunked", "fused"):
        some = [X.requires_grad_(bool(wanted >> i & 1)) for i, X in enumerate(leaves_of(problem))]
        needed = [X for X in some if X.requires_grad]
        found = torch.autograd.grad(cross_entropy(rebuilt(problem, *some), weights, backend), needed)
        expected = [g for i, g in enumerate(all_of_them) if wanted >> i & 1]
        assert_close(list(found), expected, rtol=1e-12, atol=1e-13)


@by_backend
@pytest.mark.parametrize("name", ["labels and bias", "rows without entries", "smoothed and masked", "soft"])
@pytest.mark.parametrize("summed", [True, False])
def test_gradcheck(summed, name, backend, generator):
    problem, _ = problems(generator, n=1, S=5, K=6, F=2)[name]
    weights = normal(problem.q.shape[:2], generator)

    def ell(*tensors):
        return cross_entropy(rebuilt(problem, *tensors), weights if summed else None, backend)

    assert gradcheck(ell, leaves_of(problem))
    assert gradgradcheck(ell, leaves_of(problem))


def test_targets_have_derivatives_too(generator):
    problem, C = problems(generator)["soft"]
    C = C.clone().requires_grad_()

    def ell(C):
        return cross_entropy(Problem(problem.q, problem.k, problem.bias, None, None, C), None, "chunked")

    found = torch.autograd.grad(ell(C).sum(), C)[0]
    again = C.detach().requires_grad_()
    exact = expected_of(problem, again, problem.q, problem.k, problem.bias)
    assert_close(found, torch.autograd.grad(exact.sum(), again)[0], rtol=1e-11, atol=1e-12)


@by_backend
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_is_never_negative_and_keeps_the_digits_of_confident_rows(scale, backend, generator):
    """Labels that win by far: ℓ is e⁻ᵈ, which R − N_y rounds to nothing or below it."""
    q, k = normal((1, 30, 8), generator).float(), normal((1, 25, 8), generator).float()
    q = q * scale / 8
    N = q.double() @ k.double().mT
    labels = N.argmax(-1)
    found = cross_entropy(Problem(q, k, None, None, labels, None), None, backend)
    away = (N - N.gather(-1, labels.unsqueeze(-1))).scatter(-1, labels.unsqueeze(-1), -torch.inf)
    exact = torch.log1p(away.exp().sum(-1))
    assert float(found.min()) >= 0
    # ℓ ≈ e^(−d) of a margin d, which is known to a few roundings of the logits.
    allowed = 1e-6 + 4e-6 * scale / 8 * 8
    visible = exact > 1e-30
    assert float(((found.double() - exact).abs() / exact)[visible].max()) <= allowed
    summed = cross_entropy(Problem(q, k, None, None, labels, None), torch.ones(1, 30), backend)
    assert float(summed) >= 0
    assert_close(summed.double(), exact.sum(), rtol=allowed, atol=0)


def test_what_softplus_rounds_away_beyond_twenty_is_there(generator):
    """Rows that are wrong by a little more than 20, where ℓ − 20 still has e⁻²⁰ in it."""
    q = torch.linspace(20.1, 22, 6, dtype=torch.float64)[None, :, None]
    k = torch.tensor([0.0, 1.0], dtype=torch.float64)[None, :, None]
    found = cross_entropy(Problem(q, k, None, None, torch.zeros(1, 6, dtype=torch.long), None), None, "chunked")
    assert_close(found, torch.logaddexp(q[..., 0], torch.zeros(())), rtol=1e-14, atol=0)


@by_backend
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("kind", ["labels", "soft"])
def test_loses_no_more_than_twice_what_plain_single_precision_loses(kind, scale, backend, generator, monkeypatch):
    for name, size in (("TILE", 2**12), ("COLUMNS", 24), ("KEPT", 2**12)):
        monkeypatch.setattr(tiles, name, size)
    q, k = normal((1, 400, 16), generator, scale / 4).float(), normal((1, 60, 16), generator).float()
    labels = torch.randint(60, (1, 400), generator=generator)
    C = (normal((1, 400, 60), generator) * 3).softmax(-1).float() if kind == "soft" else one_hot(labels, 60)
    problem = Problem(q, k, None, None, None if kind == "soft" else labels, C if kind == "soft" else None)
    weights = torch.rand(1, 400, generator=generator)

    def everything(compute, *tensors):
        leaves = [X.clone().requires_grad_() for X in tensors]
        value = compute(*leaves)
        return [value, *torch.autograd.grad(value, leaves)]

    def textbook(q, k):
        target = labels[0] if kind == "labels" else C[0]
        return (weights[0] * torch.nn.functional.cross_entropy(q[0] @ k[0].T, target, reduction="none")).sum()

    exact = everything(lambda q, k: (weights * cross_entropies(q, k, C.double())).sum(), q.double(), k.double())
    naive = everything(textbook, q, k)
    found = everything(lambda q, k: cross_entropy(rebuilt(problem, q, k), weights, backend), q, k)
    for mine, its, true in zip(found, naive, exact, strict=True):
        assert relative_error(mine, true) <= max(2 * relative_error(its, true), LAST_PLACE)


def test_a_row_of_no_weight_says_nothing(generator):
    problem, _ = problems(generator)["labels and bias"]
    weights = torch.ones(2, 7, dtype=torch.float64)
    weights[1, 4] = 0
    _, found = sweep(problem, weights)
    assert found.q[1, 4].eq(0).all()
    assert found.q[1, 3].ne(0).all()


@pytest.mark.skipif(fused.cpu_kernel() is None, reason="torch has no fused kernel here")
def test_the_fused_kernel_is_used_where_it_can_be(generator, monkeypatch):
    seen = []
    real = fused.attend
    monkeypatch.setattr(fused, "attend", lambda *a: seen.append(1) or real(*a))
    problem, _ = problems(generator)["labels and bias"]
    weights = torch.ones(2, 7, dtype=torch.float64)
    q = problem.q.clone().requires_grad_()
    cross_entropy(rebuilt(problem, q, problem.k, problem.bias), weights, "fused")
    assert seen == [1]
    k = problem.k.clone().requires_grad_()
    cross_entropy(rebuilt(problem, q, k, problem.bias), weights, "fused")
    cross_entropy(rebuilt(problem, q, problem.k, problem.bias), weights, "chunked")
    assert seen == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_as_it_came(dtype, generator):
    problem, C = problems(generator)["labels and bias"]
    mine = [X.detach().to(dtype).requires_grad_() for X in leaves_of(problem)]
    ell = cross_entropy(rebuilt(problem, *mine), torch.ones(2, 7), "chunked")
    exact = expected_of(problem, C, *(X.detach().double() for X in mine)).sum()
    assert relative_error(ell.double(), exact) < 1e-5
    assert all(g.dtype == dtype for g in torch.autograd.grad(ell, mine))


def test_torch_func_goes_through(generator):
    problem, C = problems(generator)["labels and bias"]
    weights = torch.ones(2, 7, dtype=torch.float64)

    def ell(q):
        return cross_entropy(rebuilt(problem, q, problem.k, problem.bias), weights, "chunked")

    exact = problem.q.clone().requires_grad_()
    expected = torch.autograd.grad(expected_of(problem, C, exact, problem.k, problem.bias).sum(), exact)[0]
    assert_close(torch.func.grad(ell)(problem.q), expected, rtol=1e-11, atol=1e-12)
