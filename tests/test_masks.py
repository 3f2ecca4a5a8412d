"""Masks: causal to the bit, padding without trace, empty distributions without NaN, and why both roles leak."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES
from instances import POTENTIALS, normal, reference_value, relative_error

F, H = 3, 3
POTENTIAL_NAMES = ("logsumexp", "logsumexp-T", "softplus", "half-square", "entmax-1.5", "sparsemax")
SPLITTINGS = (xf.LieTrotter(), xf.Strang(), xf.Yoshida(), xf.Euler(), xf.RK4())


class Grouped(nn.Module):
    """Logits of one token's targets from that token alone: ``(*batch, S, F)`` to ``(*batch, S, K)``."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, Z):
        return torch.tanh(Z) @ self.weight


class ByColumn(Grouped):
    """The same where a token's distribution is its column."""

    def forward(self, Z):
        return super().forward(Z).mT


def causal_oracles(axis, S, generator):
    net = (Grouped if axis == "classes" else ByColumn)(normal((F, S), generator))
    return [
        xf.Shift(-1),
        xf.Uniform(),
        xf.SelfPrediction(0.5),
        xf.SelfPrediction(hard=True),
        xf.Band(2),
        xf.Learned(net),
    ]


def changed_from(Z, start, generator, scale=3.0):
    other = Z.clone()
    other[..., start:, :] = normal(Z[..., start:, :].shape, generator, scale)
    return other


@pytest.mark.parametrize("heads", [None, H], ids=["one-head", "heads"])
@pytest.mark.parametrize("axis", AXES)
class TestCausal:
    @pytest.mark.parametrize("S", [1, 2, 7, 130])
    def test_no_future_token_changes_a_bit_of_the_past(self, axis, heads, S, generator):
        theta = normal((F, F) if heads is None else (heads, F, F), generator, 0.5)
        Z = normal((2, S, F), generator)
        for oracle in causal_oracles(axis, S, generator):
            model = xf.Quadratic(theta, roles="own")
            block = xf.derive(xf.CrossEntropy(axis), model, oracle=oracle, causal=True, step=0.4).double()
            out = block(Z)
            assert out.isfinite().all()
            for start in {0, S // 2, S - 1}:
                again = block(changed_from(Z, start, generator))
                assert torch.equal(again[:, :start], out[:, :start]), (oracle, start)
                assert not torch.equal(again[:, start], out[:, start])

    def test_with_every_potential_splitting_step_and_constraint(self, axis, heads, generator):
        phi, Z = normal((F, 2) if heads is None else (heads, F, 2), generator, 0.4), normal((2, 6, F), generator, 0.5)
        other = changed_from(Z, 4, generator, 0.5)
        rules = [0.1, xf.LearnedStep(0.1), xf.LearnedStep(0.1, **({"heads": heads} if heads else {"features": F}))]
        for name, splitting, constraint in product(POTENTIAL_NAMES, SPLITTINGS, (xf.Free(), xf.Sphere(), xf.Dual(1.5))):
            for step in rules if isinstance(constraint, xf.Free) else rules[:2]:
                block = xf.derive(
                    xf.Objective(POTENTIALS[name](axis)),
                    xf.Quadratic.from_factor(phi, roles="own"),
                    oracle=xf.Shift(-1),
                    splitting=splitting,
                    constraint=constraint,
                    step=step,
                    causal=True,
                ).double()
                with torch.no_grad():
                    found = block(other)
                assert found.isfinite().all()
                assert torch.equal(found[:, :4], block(Z)[:, :4]), (name, splitting, constraint, step)

    def test_through_a_stack_and_with_padding(self, axis, heads, generator):
        theta = normal((F, F) if heads is None else (heads, F, F), generator, 0.5)
        block = xf.derive(
            xf.CrossEntropy(axis), xf.Quadratic(theta, roles="own"), oracle=xf.Shift(-1), causal=True, step=0.3
        )
        stack, Z = xf.Stack.of(block, depth=5, tied=False), normal((2, 8, F), generator)
        padding = torch.ones(2, 8, dtype=torch.bool)
        padding[0, 6:] = False
        other = changed_from(Z, 5, generator)
        for inputs in ({}, {"padding": padding}):
            assert torch.equal(stack(other, **inputs)[:, :5], stack(Z, **inputs)[:, :5])

    def test_it_is_the_masked_step_written_out(self, axis, heads, generator):
        S, phi = 5, normal((H, F, 2), generator, 0.5)
        theta, Z = phi @ phi.mT, normal((2, S, F), generator)
        block = xf.derive(
            xf.CrossEntropy(axis), xf.Quadratic.from_factor(phi, "own"), oracle=xf.Uniform(), causal=True, step=0.3
        )
        expected = torch.zeros_like(Z)
        for sample in range(2):
            half = Z[sample].clone()
            for i, head in product(range(S), range(H)):  # token i attends to the tokens up to itself
                past = Z[sample, : i + 1]
                scores = past @ theta[head] @ Z[sample, i]
                half[i] -= 0.3 * torch.softmax(scores, 0) @ past @ theta[head]
            for i in range(S):
                average = half[: i + 1].mean(0)
                expected[sample, i] = half[i] + 0.3 * sum(average @ theta[head] for head in range(H))
        assert relative_error(block(Z), expected) <= 1e-12


@pytest.mark.parametrize("axis", AXES)
def test_labels_under_a_causal_mask_name_the_past(axis, generator):
    block = xf.derive(
        xf.CrossEntropy(axis), xf.Quadratic(normal((F, F), generator, 0.5), roles="own"), causal=True, step=0.3
    )
    Z, labels = normal((2, 6, F), generator), torch.tensor([[0, 1, 0, 3, 2, 5], [0, 0, 2, 1, 4, 0]])
    C = torch.nn.functional.one_hot(labels, 6).double()
    assert relative_error(block(Z, targets=labels), block(Z, targets=C if axis == "classes" else C.mT)) <= 1e-12
    labels[0, 2] = 3
    with pytest.raises(xf.XentflowError, match="labels of entries that take part, got 1 of 12"):
        block(Z, targets=labels)


@pytest.mark.parametrize("heads", [None, 4])
def test_the_attention_half_step_is_scaled_dot_product_attention(heads, generator):
    """pZθᵀ = SDPA(Zθ, Z, Z)θᵀ on the classes axis with the own role, and with a causal mask the causal one."""
    width = 16
    Z = normal((2, 10, width), generator).float()
    theta = normal((width, width) if heads is None else (heads, width, width), generator, 0.1).float()
    for causal in (True, False):
        block = xf.derive(
            xf.CrossEntropy("classes"), xf.Quadratic(theta, roles="own"), oracle=xf.Uniform(), causal=causal, step=1.0
        )
        per_head = Z if heads is None else Z.unsqueeze(1).expand(2, heads, 10, width)
        attention = nn.functional.scaled_dot_product_attention(
            per_head @ theta, per_head, per_head, is_causal=causal, scale=1.0
        )
        attention = attention @ theta.mT
        attention = attention if heads is None else attention.sum(1)
        assert relative_error(Z - block.trajectory(Z).Z[1], attention) <= 1e-6


class TestTheLeak:
    """Both roles and a causal mask: the exact gradient of the masked energy carries the future into the past."""

    def test_on_three_tokens(self):
        theta = torch.eye(2, dtype=torch.float64)
        Z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
        later = Z.clone()
        later[2] = torch.tensor([-1.0, 2.0])
        mask = torch.ones(3, 3, dtype=torch.bool).tril()
        C = mask.double() / mask.sum(-1, keepdim=True)

        def energy(Z):
            N = (Z @ theta @ Z.T).masked_fill(~mask, -torch.inf)
            return torch.logsumexp(N, -1).sum() - (C * (Z @ theta @ Z.T)).sum()

        moves = []
        for features in (Z, later):
            features = features.clone().requires_grad_()
            moves.append(-torch.autograd.grad(energy(features), features)[0])
            block = xf.derive(xf.CrossEntropy("classes"), xf.Quadratic(theta), splitting=xf.Euler())
            stepped = block(features.detach(), targets=C, mask=mask)
            assert_close(stepped - features.detach(), moves[-1], rtol=1e-12, atol=1e-12)
        assert (moves[0][0] - moves[1][0]).norm() > 0.1  # token 0 moved by what token 2 is

        own = xf.derive(xf.CrossEntropy("classes"), xf.Quadratic(theta, roles="own"), oracle=xf.Uniform(), causal=True)
        assert torch.equal(own(Z)[:2], own(later)[:2])

    def test_so_it_is_refused(self):
        with pytest.raises(xf.XentflowError, match="carries the future into the past"):
            xf.derive(xf.CrossEntropy("classes"), xf.Quadratic(torch.eye(2)), causal=True)


@pytest.mark.parametrize("heads", [None, H], ids=["one-head", "heads"])
@pytest.mark.parametrize("axis", AXES)
class TestPadding:
    @pytest.mark.parametrize("kind", ["linear", "bilinear", "both", "own"])
    def test_leaves_no_trace_in_real_tokens(self, axis, heads, kind, generator):
        S, longer, K = 5, 9, 4
        head = () if heads is None else (heads,)
        model = {
            "linear": lambda: xf.Linear(normal((*head, K, F), generator), normal((*head, K), generator)),
            "bilinear": lambda: xf.Bilinear(normal((*head, F, 2), generator), normal((2, K, 2), generator)),
            "both": lambda: xf.Quadratic(normal((*head, F, F), generator, 0.5)),
            "own": lambda: xf.Quadratic(normal((*head, F, F), generator, 0.5), roles="own"),
        }[kind]()
        Z = normal((2, S, F), generator)
        padded = torch.cat([Z, normal((2, longer - S, F), generator, 5.0)], 1)
        padding = torch.arange(longer).expand(2, longer) < S
        oracles = [xf.Uniform(), xf.SelfPrediction(0.5)]
        oracles += [xf.Band(1), xf.Shift(-1), xf.Shift(1)] if kind in ("both", "own") else []
        for name, oracle in product(POTENTIAL_NAMES, oracles):
            for splitting, constraint in (
                (xf.LieTrotter(), xf.Free()),
                (xf.Strang(), xf.Sphere()),
                (xf.Strang(), xf.Dual(1.5)),
                (xf.RK4(), xf.Free()),
            ):
                block = xf.derive(
                    xf.Objective(POTENTIALS[name](axis)),
                    model,
                    oracle=oracle,
                    splitting=splitting,
                    constraint=constraint,
                    step=0.2,
                )
                with torch.no_grad():
                    alone, among = block(Z), block(padded, padding=padding)
                assert relative_error(among[:, :S], alone) <= 1e-12, (name, oracle, splitting)
                # What stands for nothing meets nothing: it neither attracts nor moves.
                assert relative_error(among[:, S:], padded[:, S:]) <= 1e-12

    def test_ragged_samples(self, axis, heads, generator):
        """Every sample of a batch has its own length, and may have none."""
        theta = normal((F, F) if heads is None else (heads, F, F), generator, 0.5)
        Z, lengths = normal((4, 6, F), generator), (6, 4, 1, 0)
        padding = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
        block = xf.derive(xf.CrossEntropy(axis), xf.Quadratic(theta), oracle=xf.Uniform(), step=0.3)
        out = block(Z, padding=padding)
        for sample, length in enumerate(lengths):
            if length:
                assert relative_error(out[sample, :length], block(Z[sample, :length])) <= 1e-12
            assert torch.equal(out[sample, length:], Z[sample, length:])

    @pytest.mark.parametrize("kind", ["linear", "functional", "both", "own"])
    def test_labels_of_padding_say_nothing(self, axis, heads, kind, generator):
        """Where tokens own the distributions, and where they are the classes: then no label may name padding."""
        S, longer, K, head = 5, 8, 4, () if heads is None else (heads,)
        theta = normal((*head, K, F) if kind in ("linear", "functional") else (*head, F, F), generator, 0.5)
        model = {
            "linear": lambda: xf.Linear(theta),
            "functional": lambda: xf.Functional(
                lambda Z: (Z if heads is None else Z.unsqueeze(-3)) @ theta.mT, heads=heads
            ),
            "both": lambda: xf.Quadratic(theta),
            "own": lambda: xf.Quadratic(theta, roles="own"),
        }[kind]()
        block = xf.derive(xf.CrossEntropy(axis), model, step=0.3)
        Z, padding = normal((2, longer, F), generator), torch.arange(longer).expand(2, longer) < S
        tokens_own = kind in ("both", "own") or axis == "classes"
        among = K if kind in ("linear", "functional") and axis == "classes" else S
        labels = torch.randint(among, (2, *head, longer if tokens_own else K), generator=generator)
        alone = block(Z[:, :S], targets=labels[..., :S] if tokens_own else labels)
        out = block(Z, targets=labels, padding=padding)
        assert relative_error(out[:, :S], alone) <= 1e-12
        assert torch.equal(out[:, S:], Z[:, S:])
        if among == S:
            with pytest.raises(xf.XentflowError, match="expected labels of entries that take part"):
                block(Z, targets=labels.clone().fill_(S), padding=padding)

    def test_a_padding_mask_is_a_mask(self, axis, heads, generator):
        theta = normal((F, F) if heads is None else (heads, F, F), generator, 0.5)
        Z, padding = normal((2, 6, F), generator), torch.rand(2, 6, generator=generator) < 0.6
        both = padding[:, :, None] & padding[:, None, :]
        extra = torch.rand(6, 6, generator=generator) < 0.7
        mask = both if heads is None else both[:, None]
        block = xf.derive(xf.CrossEntropy(axis), xf.Quadratic(theta), oracle=xf.Uniform(), step=0.3)
        assert torch.equal(block(Z, padding=padding), block(Z, mask=mask))
        assert torch.equal(block(Z, padding=padding, mask=extra), block(Z, mask=mask & extra))


@pytest.mark.parametrize("name", POTENTIAL_NAMES)
@pytest.mark.parametrize("axis", AXES)
class TestNothingLeft:
    def test_a_masked_token_is_finite_and_stays(self, axis, name, generator):
        """Linear on the classes axis: the row is the token's only distribution."""
        K, S = 4, 5
        theta = normal((K, F), generator).requires_grad_()
        mask = torch.ones(S, K, dtype=torch.bool)
        mask[2] = False
        for oracle in (xf.Uniform(), xf.SelfPrediction(0.5), xf.SelfPrediction(hard=True)):
            block = xf.derive(xf.Objective(POTENTIALS[name](axis)), xf.Linear(theta), oracle=oracle, step=0.3)
            Z = normal((2, S, F), generator).requires_grad_()
            out = block(Z, mask=mask)
            assert out.isfinite().all()
            assert torch.equal(out[:, 2], Z[:, 2])
            flow = block.flow(Z, mask=mask)
            assert (flow.velocity(Z)[:, 2] == 0).all()
            weights = normal(out.shape, generator)
            back = torch.autograd.grad((out * weights).sum(), (Z, *block.model.parameters()))
            assert all(gradient.isfinite().all() for gradient in back)
            assert_close(back[0][:, 2], weights[:, 2], rtol=1e-12, atol=1e-12)
            (slope,) = torch.autograd.grad(block.flow(Z.detach(), mask=mask).energy(Z).sum(), Z)
            assert slope.isfinite().all()
            assert (slope[:, 2] == 0).all()

    def test_all_masked_is_the_identity(self, axis, name, generator):
        Z = normal((2, 5, F), generator).requires_grad_()
        nothing = torch.zeros(5, 5, dtype=torch.bool)
        for roles, splitting in product(("both", "own"), (xf.LieTrotter(), xf.LieTrotter(exact=True), xf.RK4())):
            model = xf.Quadratic(normal((F, F), generator), roles=roles)
            block = xf.derive(xf.Objective(POTENTIALS[name](axis)), model, oracle=xf.Uniform(), splitting=splitting)
            out = block(Z, mask=nothing)
            assert torch.equal(out, Z)
            (gradient,) = torch.autograd.grad(out.sum(), Z)
            assert torch.equal(gradient, torch.ones_like(Z))
            assert (block.flow(Z, mask=nothing).energy(Z) == 0).all()

    def test_the_masked_block_is_the_gradient_of_the_masked_energy(self, axis, name, generator):
        """Euler: Z − h ∂ℓ of an energy in which masked logits do not occur at all, one distribution at a time."""
        S = 4
        potential = POTENTIALS[name](axis)
        theta, Z = normal((F, F), generator, 0.5), normal((S, F), generator).requires_grad_()
        mask = torch.rand(S, S, generator=generator) < 0.6
        mask[0], mask[:, 1], mask[1] = True, True, True
        (mask if axis == "classes" else mask.mT)[3] = False
        one = POTENTIALS[name]("classes")
        N = Z @ theta @ Z.T
        N, open_ = (N, mask) if axis == "classes" else (N.T, mask.T)
        rows = [row[allowed] for row, allowed in zip(N, open_, strict=True) if allowed.any()]
        total = sum(reference_value(one, row[None]).sum() - row.mean() for row in rows)
        (slope,) = torch.autograd.grad(total, Z)
        block = xf.derive(
            xf.Objective(potential), xf.Quadratic(theta), oracle=xf.Uniform(), splitting=xf.Euler(), step=0.3
        )
        assert relative_error(block(Z.detach(), mask=mask), Z - 0.3 * slope) <= 1e-12
        assert_close(block.flow(Z.detach(), mask=mask).energy(Z), total, rtol=1e-12, atol=1e-12)
