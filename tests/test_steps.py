"""How far to go: the certified step against ten thousand instances, and the line search against fifteen thousand."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES, normal, potentials, random_flow, random_targets, seeded, uniform

EULER = xf.Euler()


def rise(flow: xf.GradientFlow, Z: Tensor, h: Tensor | float) -> Tensor:
    """How much an Euler step raises ℓ, each sample, relative to 1 + |ℓ|."""
    before = flow.energy(Z)
    return (flow.energy(EULER.advance(flow, Z, h)) - before) / (1 + before.abs())


# Instances below keep |N| ≲ 30. Z' = Z + hŻ is off by ε|Z| in rounding, which moves ℓ by ⟨∂ℓ, ε|Z|⟩ ≲ ε Σ|N − C||N|,
# and summing ℓ is off by as much: some hundred numbers of size 30² times ε = 2.2e-16 stay below this.
ROUNDING = 1e-12


class TestSafeStep:
    @pytest.mark.parametrize("axis", AXES)
    def test_no_rise_up_to_the_bound_in_linear_models(self, axis):
        """2 axes × 6 potentials × 25 models × 34 samples = 10 200 instances, every sample with a step of its own."""
        generator, worst, tried = seeded(AXES.index(axis)), -torch.inf, 0
        for potential in potentials(axis):
            for _ in range(25):
                S, F, K = (int(n) for n in torch.randint(1, 7, (3,), generator=generator))
                heads = (3,) if uniform(generator, 1) < 0.3 else ()
                size = 10 ** (uniform(generator, 1) * 2 - 1.5)
                model = xf.Linear(size * normal(generator, *heads, K, F), normal(generator, *heads, K))
                Z = normal(generator, 34, S, F) * 10 ** (uniform(generator, 34, 1, 1) - 0.7)
                C = random_targets(potential, generator, 34, *heads, S, K)
                flow = xf.GradientFlow(xf.Objective(potential), model, C)
                # Half the steps lie in the last hundredth below the bound, the first few on it.
                fraction = uniform(generator, 34, 1, 1)
                fraction[::2] = 1 - fraction[::2] / 100
                fraction[:4] = 1
                h = fraction * 2 * xf.safe_step(flow.objective, model)
                worst, tried = max(worst, rise(flow, Z, h).max().item()), tried + 34
        assert tried == 5100
        assert worst <= ROUNDING

    @pytest.mark.parametrize("heads", [None, 3])
    @pytest.mark.parametrize("axis", AXES)
    def test_no_rise_with_a_context_for_each_sample(self, axis, heads):
        """Bilinear contexts make every sample a linear model of its own, with its own bound."""
        generator = seeded(2 + AXES.index(axis))
        for potential in potentials(axis):
            H = () if heads is None else (heads,)
            context = normal(generator, 200, 4, 2) * 10 ** (uniform(generator, 200, 1, 1) - 0.7)
            model = xf.Bilinear(normal(generator, *H, 3, 2), context)
            Z = normal(generator, 200, 5, 3)
            C = random_targets(potential, generator, 200, *H, 5, 4)
            flow = xf.GradientFlow(xf.Objective(potential), model, C)
            bound = 2 * xf.safe_step(flow.objective, model)
            assert bound.shape == (200, 1, 1)
            for fraction in (1.0, 0.97, 0.5):
                assert rise(flow, Z, fraction * bound).max() <= ROUNDING

    @pytest.mark.parametrize("axis", AXES)
    def test_the_descent_lemma_at_the_step_itself(self, axis):
        for index, potential in enumerate(potentials(axis)):
            flow, Z = random_flow("linear", axis, 10 + index, potential=potential, batch=(50,))
            h = xf.safe_step(flow.objective, flow.model)
            fall = flow.energy(Z) - flow.energy(EULER.advance(flow, Z, h))
            assert (fall >= h / 2 * flow.dissipation(Z) - ROUNDING * (1 + flow.energy(Z).abs())).all()

    @pytest.mark.parametrize("kind", ["linear", "bilinear"])
    @pytest.mark.parametrize("heads", [None, 2])
    @pytest.mark.parametrize("axis", AXES)
    def test_the_bound_is_above_the_hessian(self, axis, heads, kind):
        for index, potential in enumerate(potentials(axis)):
            flow, Z = random_flow(kind, axis, 20 + index, potential=potential, heads=heads, S=3, F=2, K=3)
            hessian = torch.autograd.functional.hessian(flow.energy, 0.3 * Z).reshape(Z.numel(), Z.numel())
            largest = torch.linalg.eigvalsh((hessian + hessian.mT) / 2)[-1]
            assert largest <= xf.curvature_bound(flow.objective, flow.model).item() * (1 + 1e-12)

    def test_for_the_cross_entropy_the_bound_is_half_the_square_of_the_norm_of_theta(self):
        theta = normal(seeded(30), 4, 3)
        largest = torch.linalg.svdvals(theta)[0]
        for axis in AXES:
            L = xf.curvature_bound(xf.CrossEntropy(axis), xf.Linear(theta))
            assert_close(L, largest.square() / 2, rtol=1e-14, atol=0)
            assert_close(xf.safe_step(xf.CrossEntropy(axis), xf.Linear(theta)), 1 / L, rtol=1e-14, atol=0)
            cold = xf.CrossEntropy(axis, temperature=0.25)
            assert_close(xf.curvature_bound(cold, xf.Linear(theta)), 4 * L, rtol=1e-14, atol=0)

    @pytest.mark.parametrize(
        "potential",
        [xf.LogSumExp("classes"), xf.LogSumExp("classes", 0.3), xf.HalfSquare("classes"), xf.Entmax("classes", 2.0)],
        ids=repr,
    )
    def test_the_bound_is_tight_for_two_even_classes(self, potential):
        """θ = (t, −t)ᵀ at p = ½: one per cent beyond the bound already raises ℓ, one per cent below lowers it."""
        theta = torch.tensor([[1.5], [-1.5]], dtype=torch.float64)
        Z = torch.tensor([[1e-3]], dtype=torch.float64)
        C = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
        if isinstance(potential, xf.HalfSquare):
            C = torch.zeros_like(C)
        flow = xf.GradientFlow(xf.Objective(potential), xf.Linear(theta), C)
        L = xf.curvature_bound(flow.objective, flow.model)
        energy = flow.energy(Z)
        above = flow.energy(EULER.advance(flow, Z, 2.02 / L))
        below = flow.energy(EULER.advance(flow, Z, 1.98 / L))
        # ℓ − ℓ_min = ½Lz² here, so the rise is (1.02² − 1)½Lz², eight orders above rounding.
        predicted = (1.02**2 - 1) * L * Z.square().sum() / 2
        assert_close(above - energy, predicted, rtol=1e-3, atol=0)
        assert below < energy

    def test_the_sigmoid_bound_is_tight_at_one_half(self):
        flow = xf.GradientFlow(
            xf.Objective(xf.Softplus("sequence")),
            xf.Linear(torch.tensor([[2.0]], dtype=torch.float64)),
            torch.tensor([[0.5]], dtype=torch.float64),
        )
        Z = torch.tensor([[1e-3]], dtype=torch.float64)
        L = xf.curvature_bound(flow.objective, flow.model)
        assert rise(flow, Z, 2.02 / L) > 0
        assert rise(flow, Z, 1.98 / L) < 0

    @pytest.mark.parametrize("kind", ["quadratic", "own", "functional"])
    def test_refuses_where_no_bound_exists(self, kind):
        flow, _ = random_flow(kind, "classes", 40)
        name = type(flow.model).__name__
        for bound in (xf.curvature_bound, xf.safe_step):
            with pytest.raises(xf.XentflowError, match=f"expected a model affine in Z, got {name}.*use LineSearch"):
                bound(flow.objective, flow.model)


class TestLineSearch:
    @pytest.mark.parametrize("constraint", [xf.Free(), xf.Sphere(), xf.Dual(1.5)], ids=repr)
    @pytest.mark.parametrize("axis", AXES)
    def test_no_rise_in_quadratic_models(self, axis, constraint):
        """2 axes × 3 constraints × 6 potentials × 7 models × 60 samples = 15 120 instances, no tolerance at all."""
        generator, search, risen = seeded(50 + AXES.index(axis)), xf.LineSearch(), 0
        for potential in potentials(axis):
            for _ in range(7):
                S, F = (int(n) for n in torch.randint(1, 6, (2,), generator=generator))
                theta = normal(generator, F, F) * 10 ** (2 * uniform(generator, 1) - 1)
                Z = normal(generator, 60, S, F) * 10 ** (uniform(generator, 60, 1, 1) - 0.5)
                C = random_targets(potential, generator, 60, S, S)
                flow = xf.GradientFlow(xf.Objective(potential), xf.Quadratic(theta), C, constraint=constraint)
                h = search(flow, Z)
                assert h.shape == (60, 1, 1)
                risen += int((flow.energy(EULER.advance(flow, Z, h)) > flow.energy(Z)).sum())
        assert risen == 0

    @pytest.mark.parametrize("constraint", [xf.Free(), xf.Dual(1.5)], ids=repr)
    @pytest.mark.parametrize("axis", AXES)
    def test_the_step_is_the_first_that_meets_armijos_condition(self, axis, constraint):
        flow, Z = random_flow("quadratic", axis, 60, batch=(40,), constraint=constraint)
        search = xf.LineSearch(initial=4.0, shrink=0.25, slope=0.3)
        h = search(flow, Z)

        def enough(h: Tensor) -> Tensor:
            return flow.energy(EULER.advance(flow, Z, h)) <= flow.energy(Z) - 0.3 * h[..., 0, 0] * flow.dissipation(Z)

        assert enough(h).all()
        tried = torch.log(h / 4) / torch.log(torch.tensor(0.25, dtype=torch.float64))
        assert_close(tried, tried.round(), rtol=0, atol=1e-12)
        backtracked = (h < 4)[..., 0, 0]
        assert backtracked.any()
        assert not enough(h / 0.25)[backtracked].any()

    def test_every_sample_has_its_own_step(self):
        flow, Z = random_flow("quadratic", "classes", 61, batch=(20,))
        search = xf.LineSearch(initial=8.0)
        h = search(flow, Z)
        assert h.unique().numel() > 1
        C = flow.targets(Z)
        for index in range(20):
            single = xf.GradientFlow(flow.objective, flow.model, C[index])
            assert search(single, Z[index]).item() == h[index].item()

    @pytest.mark.parametrize("axis", AXES)
    def test_zero_step_at_a_minimum(self, axis):
        """Where p = C nothing moves; a sample beside it that is not at rest still gets its step."""
        flow, Z = random_flow("quadratic", axis, 62, batch=(2,))
        C = flow.targets(Z).clone()
        C[0] = flow.objective.potential.gradient(flow.model.logits(Z))[0]
        h = xf.LineSearch()(xf.GradientFlow(flow.objective, flow.model, C), Z)
        assert h[0].item() == 0
        assert h[1].item() > 0

    @pytest.mark.parametrize("kind", ["linear", "quadratic"])
    def test_dual_tokens_leave_the_origin_where_energy_falls(self, kind):
        """Where all of a sample's tokens stand there, the metric is zero, and so is the rate at first order."""
        left = 0
        for seed in range(20):
            flow, Z = random_flow(kind, "classes", 67 + seed, batch=(3,), constraint=xf.Dual(1.5))
            Z[1] = 0
            h, V = xf.LineSearch()(flow, Z), flow.velocity(Z)
            assert flow.dissipation(Z)[1] == 0
            before, after = flow.energy(Z), flow.energy(Z + h * V)
            assert (after <= before).all()
            falls = bool(flow.energy(Z + 1e-3 * V)[1] < before[1])
            if kind == "quadratic":
                # Nothing pulls at tokens that are all at the origin.
                assert (V[1] == 0).all()
                assert h[1].item() == 0
            elif falls:
                assert h[1].item() > 0
                assert after[1] < before[1]
                left += 1
        assert left >= 10 or kind == "quadratic"

    def test_zero_step_where_no_trial_lowers_the_energy(self):
        flow, Z = random_flow("quadratic", "classes", 63)
        h = xf.LineSearch(initial=1e6, trials=2)(flow, 3 * Z)
        assert h.item() == 0

    def test_a_trial_that_overflows_is_only_too_long(self):
        flow, Z = random_flow("quadratic", "classes", 64)
        h = xf.LineSearch(initial=1e200, shrink=1e-10)(flow, Z)
        assert 0 < h.item() < 1e150
        assert flow.energy(EULER.advance(flow, Z, h)) < flow.energy(Z)

    @pytest.mark.parametrize("axis", AXES)
    def test_refuses_a_game(self, axis):
        flow, Z = random_flow("own", axis, 65)
        with pytest.raises(xf.XentflowError, match="LineSearch: expected a gradient flow; a game"):
            xf.LineSearch()(flow, Z)

    def test_keeps_no_graph(self):
        flow, Z = random_flow("quadratic", "classes", 66)
        assert not xf.LineSearch()(flow, Z.requires_grad_()).requires_grad
