"""Oracles: valid distributions on both axes under any mask, and each one's definition by brute force."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES
from instances import along, normal

S, F, K, H = 5, 3, 4, 2
TOKEN_ORACLES = ("band", "shift", "learned-targets")
NAMES = ("self", "cold", "hard", "uniform", "learned", "learned-per-head", "neighbours", *TOKEN_ORACLES)


class Net(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, Z):
        return (Z.unsqueeze(-3) if self.weight.ndim == 3 else Z) @ self.weight


def make(name, heads, generator, columns):
    head = () if heads is None else (heads,)
    if name == "neighbours":
        C = torch.softmax(normal((20, columns), generator), -1)
        return xf.NearestNeighbours(3).remember(normal((20, F), generator), C)
    if name == "learned-targets":
        oracle = xf.LearnedTargets(S, columns).double()
        with torch.no_grad():
            oracle.logits.copy_(normal((S, columns), generator))
        return oracle
    return {
        "self": lambda: xf.SelfPrediction(),
        "cold": lambda: xf.SelfPrediction(0.1),
        "hard": lambda: xf.SelfPrediction(hard=True),
        "uniform": xf.Uniform,
        "learned": lambda: xf.Learned(Net(normal((F, columns), generator))),
        "learned-per-head": lambda: xf.Learned(Net(normal((*head, F, columns), generator))),
        "band": lambda: xf.Band(1),
        "shift": lambda: xf.Shift(1),
    }[name]()


def logits(name, heads, generator):
    columns = S if name in TOKEN_ORACLES else K
    head = () if heads is None else (heads,)
    return normal((2, *head, S, columns), generator), normal((2, S, F), generator), columns


def require_distributions(C, axis, mask=None):
    assert C.isfinite().all()
    assert (C >= 0).all()
    totals = C.sum(along(axis))
    alive = torch.ones_like(C, dtype=torch.bool) if mask is None else mask.expand(C.shape)
    assert (C[~alive] == 0).all()
    expected = alive.any(along(axis)).double()
    assert_close(totals, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("heads", [None, H])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", AXES)
class TestEveryOracle:
    def test_gives_distributions(self, axis, name, heads, generator):
        N, Z, columns = logits(name, heads, generator)
        oracle = make(name, heads, generator, columns)
        C = oracle(Z, N, axis)
        assert C.shape == N.shape
        assert C.dtype == N.dtype
        require_distributions(C, axis)

    def test_and_under_masks(self, axis, name, heads, generator):
        """Some distributions have one entry, one has none."""
        N, Z, columns = logits(name, heads, generator)
        oracle = make(name, heads, generator, columns)
        masks = [torch.rand(N.shape, generator=generator) < share for share in (0.2, 0.5, 0.9)]
        masks += [torch.zeros(S, columns, dtype=torch.bool), torch.rand(S, columns, generator=generator) < 0.5]
        lower = torch.ones(S, columns, dtype=torch.bool).tril()
        for mask in [*masks, lower, lower.logical_not(), torch.ones(S, 1, dtype=torch.bool)]:
            C = oracle(Z, N, axis, mask)
            require_distributions(C, axis, mask)
            xf.LogSumExp(axis).require_domain("C", C, mask)

    def test_refuses_targets(self, axis, name, heads, generator):
        N, Z, columns = logits(name, heads, generator)
        oracle = make(name, heads, generator, columns)
        with pytest.raises(xf.XentflowError, match=rf"targets: expected none, .* {type(oracle).__name__}, makes its"):
            oracle(Z, N, axis, None, torch.softmax(N, along(axis)))

    def test_says_where_its_targets_come_from(self, axis, name, heads, generator):
        oracle = make(name, heads, generator, S if name in TOKEN_ORACLES else K)
        assert oracle.uses_labels is False
        assert isinstance(oracle.sees, str)
        assert len(oracle.sees) > 5

    def test_a_look_alike_will_do_where_logits_are_not_read(self, axis, name, heads, generator):
        N, Z, columns = logits(name, heads, generator)
        oracle = make(name, heads, generator, columns)
        look_alike = N.new_empty(()).expand(N.shape)
        if not oracle.reads_logits:
            assert torch.equal(oracle(Z, look_alike, axis), oracle(Z, N, axis))
        assert oracle.reads_logits == isinstance(oracle, xf.SelfPrediction)


class TestGiven:
    def test_takes_what_it_is_given(self, generator):
        C = normal((S, K), generator)
        assert xf.Given()(normal((S, F), generator), C, "classes", None, C) is C
        assert xf.Given().uses_labels

    def test_asks_for_it(self, generator):
        with pytest.raises(xf.XentflowError, match=r"targets: expected C or labels, .* oracle is Given; got none"):
            xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal((K, F), generator)))(normal((S, F), generator))


class TestSelfPrediction:
    @pytest.mark.parametrize("axis", AXES)
    def test_stands_still_at_temperature_one(self, axis, generator):
        Z = normal((2, S, F), generator)
        for splitting in (xf.Euler(), xf.RK4()):
            block = xf.derive(
                xf.CrossEntropy(axis),
                xf.Quadratic(normal((H, F, F), generator, 0.5)),
                oracle=xf.SelfPrediction(),
                splitting=splitting,
            )
            assert_close(block(Z), Z, rtol=0, atol=1e-13)
        assert (block.flow(Z).dissipation(Z) < 1e-25).all()

    @pytest.mark.parametrize("axis", AXES)
    def test_is_a_softmax_at_any_temperature(self, axis, generator):
        N = normal((2, S, K), generator)
        for T in (0.1, 1.0, 3.0):
            scaled = torch.exp(N / T)
            expected = scaled / scaled.sum(along(axis), keepdim=True)
            assert_close(xf.SelfPrediction(T)(N, N, axis), expected, rtol=1e-13, atol=0)

    @pytest.mark.parametrize("axis", AXES)
    def test_hard_puts_all_on_the_largest_that_is_left(self, axis, generator):
        N, mask = normal((S, K), generator), torch.rand(S, K, generator=generator) < 0.5
        C = xf.SelfPrediction(hard=True)(N, N, axis, mask)
        rows, allowed, found = (N, mask, C) if axis == "classes" else (N.T, mask.T, C.T)
        for n, left, c in zip(rows, allowed, found, strict=True):
            indices = [k for k in range(len(n)) if left[k]]
            best = max(indices, key=lambda k: float(n[k])) if indices else None
            assert [k for k in range(len(c)) if c[k] == 1] == ([] if best is None else [best])

    def test_colder_targets_sharpen(self, generator):
        block = xf.derive(
            xf.CrossEntropy("classes"), xf.Linear(normal((K, F), generator)), oracle=xf.SelfPrediction(0.3), step=0.2
        )
        Z = normal((50, S, F), generator)
        before, after = (torch.softmax(block.model.logits(features), -1) for features in (Z, block(Z)))
        assert (after.amax(-1).mean() > before.amax(-1).mean()).item()


class TestPositions:
    """Each token's targets, token by token; a token owns a row on the classes axis and a column on the other."""

    @pytest.mark.parametrize("offset", [-6, -2, -1, 0, 1, 3, 5])
    @pytest.mark.parametrize("axis", AXES)
    def test_shift(self, axis, offset, generator):
        C = xf.Shift(offset)(normal((S, F), generator), normal((2, S, S), generator), axis)
        for token in range(S):
            owned = C[0, token] if axis == "classes" else C[0, :, token]
            aim = token + offset if 0 <= token + offset < S else token
            assert owned.tolist() == [float(other == aim) for other in range(S)]

    @pytest.mark.parametrize("width", [0, 1, 2, 9])
    @pytest.mark.parametrize("axis", AXES)
    def test_band(self, axis, width, generator):
        C = xf.Band(width)(normal((S, F), generator), normal((2, S, S), generator), axis)
        for token in range(S):
            owned = C[0, token] if axis == "classes" else C[0, :, token]
            near = [abs(other - token) <= width for other in range(S)]
            assert_close(owned, torch.tensor(near).double() / sum(near))

    def test_learned_targets_start_even_and_learn(self, generator):
        oracle = xf.LearnedTargets(S).double()
        Z, N = normal((2, S, F), generator), normal((2, S, S), generator)
        assert_close(oracle(Z, N, "classes"), torch.full((2, S, S), 1 / S, dtype=torch.float64))
        (oracle(Z, N, "classes") * N).sum().backward()
        assert oracle.logits.grad.abs().min() > 0
        assert xf.LearnedTargets(2, 3).logits.shape == (2, 3)

    def test_relative_logits_are_a_function_of_the_distance(self):
        oracle = xf.LearnedTargets(3, 4, heads=2, relative=True).double()
        with torch.no_grad():
            oracle.logits.copy_(torch.arange(12.0).view(2, 6).sin())
        C = oracle(torch.zeros(5, 3, 2).double(), torch.zeros(5, 2, 3, 4).double(), "classes")
        assert oracle.logits.shape == (2, 6)
        for head in range(2):
            wanted = [[oracle.logits[head, k - s + 2].item() for k in range(4)] for s in range(3)]
            assert_close(C[3, head], torch.softmax(torch.tensor(wanted, dtype=torch.float64), -1))
        C.square().sum().backward()
        assert oracle.logits.grad.any()

    def test_under_a_mask_weight_moves_to_what_is_left(self, generator):
        N, Z = normal((S, S), generator), normal((S, F), generator)
        padding = torch.tensor([True, True, True, False, False])
        mask = padding[:, None] & padding[None]
        C = xf.Shift(1)(Z, N, "classes", mask)
        assert C[1].tolist() == [0, 0, 1, 0, 0]
        assert C[2].tolist() == [0, 0, 1, 0, 0]  # what it aims at is masked: like the last token, it aims at itself
        # Where neither is left, weight goes evenly over what is.
        mask[2, 2] = False
        assert xf.Shift(1)(Z, N, "classes", mask)[2].tolist() == [0.5, 0.5, 0, 0, 0]
        assert (C[3:] == 0).all()

    @pytest.mark.parametrize("oracle", [xf.Shift(), xf.Band()])
    def test_needs_square_logits(self, oracle, generator):
        with pytest.raises(xf.XentflowError, match=r"expected square logits \(a quadratic model's\), got \(5, 4\)"):
            oracle(normal((S, F), generator), normal((S, K), generator), "classes")


class TestLearned:
    @pytest.mark.parametrize("axis", AXES)
    def test_is_a_softmax_of_the_net(self, axis, generator):
        net, Z = Net(normal((F, K), generator)), normal((2, S, F), generator)
        N = torch.exp(Z @ net.weight.detach())
        C = xf.Learned(net)(Z, normal((2, H, S, K), generator), axis)
        expected = (N / N.sum(along(axis), keepdim=True)).unsqueeze(1).expand(2, H, S, K)
        assert_close(C.detach(), expected, rtol=1e-13, atol=0)

    def test_learns_through_the_block(self, generator):
        net = nn.Linear(F, K).double()
        block = xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal((K, F), generator)), oracle=xf.Learned(net))
        block(normal((2, S, F), generator)).square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in block.parameters())

    @pytest.mark.parametrize("shape", [(S, K + 1), (S, 1), (1, K)])
    def test_refuses_logits_of_another_shape(self, shape, generator):
        class Wrong(nn.Module):
            def forward(self, Z):
                return torch.zeros(2, *shape, dtype=torch.float64)

        with pytest.raises(xf.XentflowError, match=r"net: expected logits like the model's, \(2, 5, 4\), got \(2, "):
            xf.Learned(Wrong())(normal((2, S, F), generator), normal((2, S, K), generator), "classes")


class TestNearestNeighbours:
    @pytest.mark.parametrize("k", [1, 3, 20])
    @pytest.mark.parametrize(("axis", "heads"), list(product(AXES, (None, H))))
    def test_against_brute_force(self, axis, heads, k, generator):
        memory, known = normal((20, F), generator), torch.softmax(normal((20, K), generator), -1)
        oracle = xf.NearestNeighbours(k).remember(memory, known)
        N, Z, _ = logits("neighbours", heads, generator)
        C = oracle(Z, N, axis)
        for sample, token in product(range(2), range(S)):
            distances = [float((Z[sample, token] - stored).square().sum()) for stored in memory]
            nearest = sorted(range(20), key=distances.__getitem__)[:k]
            expected = sum(known[index] for index in nearest) / k
            if axis == "classes":
                found = C[sample, token] if heads is None else C[sample, 0, token]
                assert_close(found, expected, rtol=1e-12, atol=1e-12)
        if axis == "sequence":  # the classes axis is in the loop above; here the same, brought to columns that sum to 1
            rows = oracle(Z, N, "classes")
            assert_close(C, rows / rows.sum(-2, keepdim=True), rtol=1e-12, atol=1e-12)

    def test_a_new_memory_replaces_the_old(self, generator):
        oracle = xf.NearestNeighbours(1).remember(normal((5, F), generator), torch.eye(K).double()[[0, 0, 0, 0, 0]])
        Z, N = normal((S, F), generator), normal((S, K), generator)
        assert (oracle(Z, N, "classes")[:, 0] == 1).all()
        oracle.remember(normal((5, F), generator), torch.eye(K).double()[[2, 2, 2, 2, 2]])
        assert (oracle(Z, N, "classes")[:, 2] == 1).all()

    def test_a_block_with_a_memory(self, generator):
        theta = normal((K, F), generator)
        oracle = xf.NearestNeighbours(2).remember(normal((30, F), generator), torch.eye(K).double().repeat(8, 1)[:30])
        block, Z = (
            xf.derive(xf.CrossEntropy("classes"), xf.Linear(theta), oracle=oracle, step=0.2),
            normal((S, F), generator),
        )
        C = oracle(Z, block.model.logits(Z), "classes")
        given = xf.derive(xf.CrossEntropy("classes"), xf.Linear(theta), step=0.2)
        assert torch.equal(block(Z), given(Z, targets=C))
        assert not block.uses_labels
        assert set(block.state_dict()) == {"model.theta", "oracle.memory", "oracle.memory_targets"}


def test_given_alone_uses_labels():
    uses = {
        oracle.__name__: oracle.uses_labels
        for oracle in xf.Oracle.__subclasses__()
        if oracle.__module__.startswith("xentflow.")
    }
    assert uses == {
        "Given": True,
        "SelfPrediction": False,
        "Uniform": False,
        "Learned": False,
        "LearnedTargets": False,
        "Shift": False,
        "Band": False,
        "NearestNeighbours": False,
    }
