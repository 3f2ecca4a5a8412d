"""What every process compares with the same computed alone: relative differences by name."""

from itertools import product

import torch

import xentflow as xf
from xentflow import sharded
from xentflow.sharded.collectives import summed

F, S, K = 7, 13, 22
DTYPES = (torch.float64, torch.float32)
AXES = ("classes", "sequence")
EXACT = 1e-12
"""Relative difference allowed in float64; see ``compare`` for float32."""


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def cut(length, rank, size):
    """Unequal pieces: the last process has the least."""
    edges = [round(length * (index / size) ** 0.8) for index in range(size + 1)]
    return slice(edges[rank], edges[rank + 1])


def gap(found, expected, whole=None):
    """Largest difference, relative to the whole that the expected is a piece of: a piece may be all but zero."""
    whole = expected if whole is None else whole
    return float((found.detach().double() - expected.detach().double()).abs().max() / _size(whole))


def _size(tensor):
    largest = float(tensor.detach().abs().max())
    return largest if largest > 0 else 1.0


def compare(dtype, alone, shared, whole, cuts, logits):
    """Value and gradients of ``shared`` on pieces against those of ``alone`` on the whole: (difference, allowed).

    alone(inputs) and shared(inputs) give a value and a scalar to differentiate, alike on every process where the value
    is; cuts: the piece of the value and of each input that this process holds; logits: N, whose size says what may be
    lost: a part's log-sum-exp is known in 32 bits, so all its weights have a relative error of up to 2⁻²⁴ of that.
    """

    def both(function, inputs):
        inputs = [X.detach().clone().requires_grad_() for X in inputs]
        value, scalar = function(*inputs)
        return [value.detach(), *torch.autograd.grad(scalar, inputs)]

    expected = both(alone, [X.double() for X in whole])
    found = both(shared, [X[cut].to(dtype) for X, cut in zip(whole, cuts[1:], strict=True)])
    names = ["value", *(f"gradient {number}" for number in range(len(whole)))]
    results = {}
    allowed = EXACT if dtype == torch.float64 else max(1e-6, torch.finfo(dtype).eps * float(logits.abs().max()))
    for name, ours, exact, cut in zip(names, found, expected, cuts, strict=True):
        results[name] = (gap(ours, exact[cut], exact), allowed)
    return results


ALL = (slice(None),)


def along(dim, piece, ndim):
    return tuple(piece if each == dim else slice(None) for each in range(ndim))


def named(name, results):
    return {f"{name} {key}": value for key, value in results.items()}


def losses(rank, size):
    """Every axis, cut, kind of target, reduction and dtype, with gradients."""
    found = {}
    for dtype, axis, shard, kind, reduction in product(
        DTYPES, AXES, AXES, ("labels", "targets", "ignored"), ("mean", "none")
    ):
        # In 64 bits with logits of up to a hundred, in 32 with usual ones.
        scale = 12.0 if dtype == torch.float64 else 1.0
        name = f"{dtype} {axis} {shard} {kind} {reduction}"
        found |= named(name, _loss(rank, size, dtype, axis, shard, kind, scale, reduction))
    return found


def _loss(rank, size, dtype, axis, shard, kind, scale, reduction):
    whole = [scale * normal(2, S, F), normal(K, F, seed=1), normal(K, seed=2)]
    rows, entries = (S, K) if axis == "classes" else (K, S)
    mine = cut(S if shard == "sequence" else K, rank, size)
    if kind == "targets":
        C = normal(2, S, K, seed=4).softmax(-1 if axis == "classes" else -2)
        own_C = C[along(1 if shard == "sequence" else 2, mine, 3)].to(dtype)
    else:
        C = torch.randint(entries, (2, rows), generator=torch.Generator().manual_seed(3))
        if kind == "ignored":
            C[:, ::3] = -1
        own_C = C if shard == axis else C[:, mine]
    part = slice(None) if shard == axis else mine
    weights = normal(2, rows, seed=5)
    options = {"axis": axis, "ignore_index": -1 if kind == "ignored" else None, "reduction": reduction}

    def alone(Z, theta, bias):
        ell = xf.linear_cross_entropy(Z, theta, C.to(Z) if kind == "targets" else C, bias=bias, **options)
        return ell, ell if reduction == "mean" else (ell * weights.to(Z)).sum()

    def shared(Z, theta, bias):
        ell = sharded.linear_cross_entropy(Z, theta, own_C, shard=shard, bias=bias, **options)
        if reduction == "mean":
            assert kind == "targets" or ell >= 0
            return ell, ell
        scalar = (ell * weights[:, part].to(Z)).sum()
        return ell, scalar if shard == axis else summed(scalar, None)

    of_value = ALL if shard == axis or reduction == "mean" else (slice(None), mine)
    cuts = [(slice(None), mine), ALL, ALL] if shard == "sequence" else [ALL, (mine,), (mine,)]
    of_value = () if reduction == "mean" else of_value
    return compare(dtype, alone, shared, whole, [of_value, *cuts], whole[0] @ whole[1].mT + whole[2])


def attention(rank, size):
    """Cross-, self- and quadratic attention, with gradients."""
    found = {}
    mine = (slice(None), cut(S, rank, size))
    weights = normal(2, S, F, seed=3)
    X, theta, square = normal(2, S, F), normal(K, F, seed=1), 0.5 * normal(F, F, seed=2)

    def weighed(function, piece=ALL):
        def both(*inputs):
            value = function(*inputs)
            return value, (value * weights[piece].to(value)).sum()

        return both

    for dtype, axis in product(DTYPES, AXES):
        for shard in AXES:
            of_value = mine if shard == "sequence" else ALL
            found |= named(
                f"cross {dtype} {axis} {shard}",
                compare(
                    dtype,
                    weighed(lambda Z, theta, axis=axis: xf.cross_attention(Z, theta, axis=axis)),
                    weighed(
                        lambda Z, theta, axis=axis, shard=shard: sharded.cross_attention(
                            Z, theta, axis=axis, shard=shard
                        ),
                        of_value,
                    ),
                    [X, theta],
                    [of_value, of_value, ALL if shard == "sequence" else (cut(K, rank, size),)],
                    X @ theta.mT,
                ),
            )
        found |= named(
            f"self {dtype} {axis}",
            compare(
                dtype,
                weighed(lambda X, axis=axis: xf.self_attention(X, axis=axis)),
                weighed(lambda X, axis=axis: sharded.self_attention(X, axis=axis), mine),
                [0.5 * X],
                [mine, mine],
                0.25 * X @ X.mT,
            ),
        )
        for roles in ("both", "own"):
            found |= named(
                f"quadratic {dtype} {axis} {roles}",
                compare(
                    dtype,
                    weighed(lambda Z, theta, axis=axis, roles=roles: _quadratic(Z, theta, axis, roles)),
                    weighed(
                        lambda Z, theta, axis=axis, roles=roles: sharded.quadratic_attention(
                            Z, theta, axis=axis, roles=roles
                        ),
                        mine,
                    ),
                    [0.7 * X, square],
                    [mine, mine, ALL],
                    0.49 * X @ square @ X.mT,
                ),
            )
    return found


def _quadratic(Z, theta, axis, roles):
    C = torch.full((2, S, S), 1 / S, dtype=Z.dtype)
    return xf.feature_gradient(xf.CrossEntropy(axis), xf.Quadratic(theta, roles), Z, C).attention


def confident(rank, size):
    """Rows of which R − N_y, in 32 bits, says nothing: ℓ and its derivative by the label's logit, and what is lost."""
    found = {}
    each = 3
    mine = slice(each * rank, each * (rank + 1))
    for label in (0, each * size - 1):
        theta = torch.linspace(-1, 0, each * size)[:, None]
        theta[label] = 1
        Z = torch.tensor([[60.0], [25.0], [5.0], [300.0]])
        labels = torch.full((4,), label)
        N = (Z @ theta.mT).double()
        own = N.gather(-1, labels[:, None]).squeeze(-1)
        away = N.scatter(-1, labels[:, None], -torch.inf).logsumexp(-1) - own
        exact = -torch.nn.functional.logsigmoid(-away)
        part = theta[mine].clone().requires_grad_()
        ell = sharded.linear_cross_entropy(Z, part, labels, axis="classes", shard="classes", reduction="none")
        assert (ell >= 0).all()
        # An error of one part in 2²⁴ of a logit is one of ℓ, relative to ℓ itself.
        allowed = 4 * torch.finfo(torch.float32).eps * Z.squeeze(-1)
        lost = ((ell.detach() - exact).abs() / exact)[exact > 1e-35] / allowed[exact > 1e-35]
        found[f"{label} value"] = (float(lost.max()), 1.0)
        (gradient,) = torch.autograd.grad(ell[1], part)
        assert torch.isfinite(gradient).all()
        if mine.start <= label < mine.stop:
            expected = float(-torch.sigmoid(away[1]) * Z[1])
            found[f"{label} derivative"] = (abs(float(gradient[label - mine.start]) / expected - 1), float(allowed[1]))
    return found


def large(rank, size):
    """More logits than the plain form takes: the kernels that go tile by tile."""
    S, K = 1100, 4000
    labels = torch.randint(K, (S,), generator=torch.Generator().manual_seed(2))

    def alone(Z, theta):
        ell = xf.linear_cross_entropy(Z, theta, labels, axis="classes")
        return ell, ell

    def shared(Z, theta):
        ell = sharded.linear_cross_entropy(Z, theta, labels, axis="classes", shard="classes")
        return ell, ell

    whole = [normal(S, 16), normal(K, 16, seed=1)]
    found = named(
        "loss", compare(torch.float32, alone, shared, whole, [(), ALL, (cut(K, rank, size),)], whole[0] @ whole[1].mT)
    )
    mine = (cut(1600, rank, size),)

    def self_alone(X):
        value = xf.self_attention(X, axis="classes")
        return value, value.sum()

    def self_shared(X):
        value = sharded.self_attention(X, axis="classes")
        return value, value.sum()

    X = 0.5 * normal(1600, 16)
    return found | named("self", compare(torch.float32, self_alone, self_shared, [X], [mine, mine], X @ X.mT))


def refusals(rank, size):
    """What is said of bad input, on every process alike."""
    Z, theta = normal(S, F), normal(K, F)
    calls = {
        "axis: expected": lambda: sharded.linear_cross_entropy(
            Z, theta, torch.zeros(S).long(), axis="classes", shard="K"
        ),
        "C: expected labels from 0 to": lambda: sharded.linear_cross_entropy(
            Z, theta, torch.full((S,), size * K), axis="classes", shard="classes"
        ),
        "C: expected integer labels": lambda: sharded.linear_cross_entropy(
            Z, theta, torch.zeros(S + 1).long(), axis="classes", shard="classes"
        ),
        "C: expected (13, 22)": lambda: sharded.linear_cross_entropy(
            Z, theta, torch.zeros(S, K + 1).double(), axis="classes", shard="classes"
        ),
        "C: expected entries of at least 0 that sum to one": lambda: sharded.linear_cross_entropy(
            Z, theta, torch.full((S, K), 2.0 / (size * K)).double(), axis="classes", shard="classes"
        ),
        "theta: expected finite": lambda: sharded.quadratic_attention(Z, theta[:F] * torch.nan, axis="classes"),
        "theta: expected a torch.Tensor": lambda: sharded.quadratic_attention(Z, [[1.0]], axis="classes"),
        "theta: expected (K, F)": lambda: sharded.linear_cross_entropy(
            Z, theta[None], torch.zeros(S).long(), axis="classes", shard="classes"
        ),
        "reduction: expected": lambda: sharded.linear_cross_entropy(
            Z, theta, torch.zeros(S).long(), axis="classes", shard="classes", reduction="all"
        ),
        "ignore_index: expected": lambda: sharded.linear_cross_entropy(
            Z, theta, torch.zeros(S, K), axis="classes", shard="classes", ignore_index=0
        ),
        "theta: expected (7, 7)": lambda: sharded.quadratic_attention(Z, theta, axis="classes"),
        "roles: expected": lambda: sharded.quadratic_attention(Z, theta[:F], axis="classes", roles="all"),
        "theta: expected (K, 7)": lambda: sharded.cross_attention(Z, theta[:, 1:], axis="classes", shard="classes"),
    }
    said = {}
    for expected, call in calls.items():
        try:
            call()
        except xf.XentflowError as error:
            said[expected] = str(error)
        else:
            said[expected] = "nothing"
    return said


def everything(rank, size):
    """All of the above in one group: starting one takes longer than using it."""
    checks = (losses, attention, confident, large, refusals)
    return {check.__name__: check(rank, size) for check in checks}
