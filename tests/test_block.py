"""Every block is the splitting step of its objective, written out here a second time in plain formulas and loops.

Nothing in the reference calls the package: weights are textbook formulas, pullbacks are einsum, the exact sub-flow is a
matrix exponential, retractions are a division and a Cholesky factor.
"""

from dataclasses import dataclass
from itertools import product

import pytest
import scipy.linalg
import torch
from torch import Tensor
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES, seeded
from instances import HEADS, MODELS, POTENTIALS, draw_instance, draw_targets, normal, reference_weights, relative_error

S, F, K, G, H = 4, 3, 5, 2, 3
STEP = 0.2
KINDS = ("linear", "linear-bias", "both", "own", "factor", "own-factor", "bilinear", "functional")
WEIGHTS = ("logsumexp", "logsumexp-T", "softplus", "half-square", "entmax-1.5", "sparsemax")
SPLITTINGS = (
    xf.LieTrotter(),
    xf.LieTrotter(exact=True),
    xf.LieTrotter(substep=xf.RK4()),
    xf.Strang(),
    xf.Strang(exact=True),
    xf.Yoshida(),
    xf.Euler(),
    xf.Heun(),
    xf.RK4(),
)
CONSTRAINTS = (xf.Free(), xf.Sphere(), xf.Sphere(1.3), xf.Dual(1.3), xf.Whitened())


@dataclass(frozen=True)
class Problem:
    """A model's tensors and what its block acts on; ``theta`` has a leading head dimension, of size one for no heads.

    ``theta2`` stands in the target term.
    """

    kind: str
    potential: xf.Potential
    theta: Tensor
    theta2: Tensor
    extra: Tensor | None
    Z: Tensor
    C: Tensor
    mask: Tensor | None
    heads: bool

    def model(self, theta: Tensor) -> xf.Model:
        theta = theta if self.heads else theta[0]
        if self.kind == "linear":
            return xf.Linear(theta)
        if self.kind == "linear-bias":
            return xf.Linear(theta, self.extra if self.heads else self.extra[0])
        if self.kind in ("both", "own"):
            return xf.Quadratic(theta, roles=self.kind)
        if self.kind in ("factor", "own-factor"):
            return xf.Quadratic.from_factor(theta, roles="own" if "own" in self.kind else "both")
        if self.kind == "bilinear":
            return xf.Bilinear(theta, self.extra)
        return xf.Functional(lambda Z: self.network(Z, theta), heads=H if self.heads else None)

    @staticmethod
    def network(Z: Tensor, theta: Tensor) -> Tensor:
        hidden = torch.tanh(Z.cumsum(-2))
        return (hidden.unsqueeze(-3) if theta.ndim == 3 else hidden) @ theta.mT

    def matrix(self, theta: Tensor) -> Tensor:
        return torch.einsum("hfr,hgr->hfg", theta, theta) if "factor" in self.kind else theta

    def logits(self, Z: Tensor) -> Tensor:
        """N with a head dimension always."""
        theta = self.matrix(self.theta)
        if self.kind.startswith("linear"):
            N = torch.einsum("...if,hkf->...hik", Z, theta)
            return N if self.kind == "linear" else N + self.extra[:, None, :]
        if self.kind == "bilinear":
            return torch.einsum("...if,hfg,...kg->...hik", Z, theta, self.extra)
        if self.kind == "functional":
            return self.network(Z, theta)
        return torch.einsum("...if,hfg,...jg->...hij", Z, theta, Z)

    def pulled(self, Z: Tensor, M: Tensor, theta: Tensor) -> Tensor:
        """M : ∂_Z N, summed over heads; the owned role alone where tokens play only that."""
        matrix = self.matrix(theta)
        if self.kind.startswith("linear"):
            return torch.einsum("...hik,hkf->...if", M, matrix)
        if self.kind == "bilinear":
            return torch.einsum("...hik,...kg,hfg->...if", M, self.extra, matrix)
        if self.kind == "functional":
            at = Z.detach().requires_grad_()
            return torch.autograd.grad((self.network(at, theta) * M.detach()).sum(), at)[0]
        query = torch.einsum("...hij,...jg,hfg->...if", M, Z, matrix)
        key = torch.einsum("...hji,...jf,hfg->...ig", M, Z, matrix)
        if "own" not in self.kind:
            return query + key
        return query if self.potential.axis == "classes" else key

    def attention(self, Z: Tensor) -> Tensor:
        N = self.logits(Z)
        if self.mask is None:
            return self.pulled(Z, reference_weights(self.potential, N), self.theta)
        out_of_sight = N.amin() - 100
        p = reference_weights(self.potential, torch.where(self.mask, N, out_of_sight))
        return self.pulled(Z, torch.where(self.mask, p, 0.0), self.theta)

    def target(self, Z: Tensor) -> Tensor:
        return self.pulled(Z, self.C if self.mask is None else torch.where(self.mask, self.C, 0.0), self.theta2)

    def block(self, **settings) -> xf.DerivedBlock:
        target_model = None if self.theta2 is self.theta else self.model(self.theta2)
        return xf.derive(xf.Objective(self.potential), self.model(self.theta), target_model=target_model, **settings)

    def inputs(self) -> dict[str, Tensor]:
        shown = {"targets": self.C if self.heads else self.C.squeeze(-3)}
        return shown if self.mask is None else {**shown, "mask": self.mask}


def draw(kind, potential, generator, *, heads=False, batch=(), masked=False, apart=False) -> Problem:
    heads_shape = (H if heads else 1,)
    shape = {"linear": (K, F), "linear-bias": (K, F), "bilinear": (F, G), "functional": (K, F)}.get(kind)
    shape = shape or ((F, 2) if "factor" in kind else (F, F))
    theta = normal((*heads_shape, *shape), generator, 0.4)
    theta2 = normal((*heads_shape, *shape), generator, 0.4) if apart else theta
    extra = {
        "linear-bias": lambda: normal((*heads_shape, K), generator),
        "bilinear": lambda: normal((*batch, K, G), generator),
    }.get(kind, lambda: None)()
    columns = K if shape != (F, F) and "factor" not in kind else S
    Z = normal((*batch, S, F), generator)
    C = draw_targets(potential, (*batch, *heads_shape, S, columns), generator)
    mask = None
    if masked:
        mask = torch.rand((S, columns), generator=generator) < 0.7
        mask[0], mask[:, 0] = True, True  # something is left everywhere …
        (mask if potential.axis == "classes" else mask.mT)[2] = False  # … but in one distribution
        C = torch.where(mask, C, 0.0)
        if isinstance(potential, xf.LogSumExp | xf.Entmax):
            C = C / C.sum(potential.dim, keepdim=True).clamp_min(1e-30)
    return Problem(kind, potential, theta, theta2, extra, Z, C, mask, heads)


def place(constraint: xf.Constraint, Z: Tensor) -> Tensor:
    if isinstance(constraint, xf.Sphere) and constraint.radius is not None:
        return constraint.radius * Z / Z.square().sum(-1, keepdim=True).sqrt()
    return orthonormal(Z) if isinstance(constraint, xf.Whitened) else Z


def features(constraint: xf.Constraint, Z: Tensor) -> Tensor:
    if isinstance(constraint, xf.Dual):
        return constraint.radius * Z / Z.square().sum(-1, keepdim=True).sqrt()
    return Z


def project(constraint: xf.Constraint, Z: Tensor, V: Tensor) -> Tensor:
    if isinstance(constraint, xf.Sphere):
        return V - Z * (Z * V).sum(-1, keepdim=True) / (Z * Z).sum(-1, keepdim=True)
    if isinstance(constraint, xf.Whitened):
        skew = torch.einsum("...sf,...sg->...fg", Z, V)
        return V - torch.einsum("...sf,...fg->...sg", Z, skew + skew.mT) / (2 * Z.shape[-2])
    return V


def retract(constraint: xf.Constraint, Z: Tensor, V: Tensor) -> Tensor:
    moved = Z + V
    if isinstance(constraint, xf.Sphere):
        radius = Z.square().sum(-1, keepdim=True).sqrt() if constraint.radius is None else constraint.radius
        return radius * moved / moved.square().sum(-1, keepdim=True).sqrt()
    return orthonormal(moved) if isinstance(constraint, xf.Whitened) else moved


def orthonormal(Z: Tensor) -> Tensor:
    """√S times the factor Q of Z = QR with R's diagonal positive: R is the Cholesky factor of ZᵀZ."""
    R = torch.linalg.cholesky(Z.mT @ Z, upper=True)
    return Z.shape[-2] ** 0.5 * torch.linalg.solve_triangular(R, Z, upper=True, left=False)


def stepped(name: str, velocity, move, Z: Tensor, h: float) -> Tensor:
    """One step of a textbook integrator; ``move`` is Z + V, or its retraction."""
    k1 = velocity(Z)
    if name == "Euler":
        return move(Z, h * k1)
    if name == "Heun":
        return move(Z, h * (k1 + velocity(move(Z, h * k1))) / 2)
    k2 = velocity(move(Z, h * k1 / 2))
    k3 = velocity(move(Z, h * k2 / 2))
    k4 = velocity(move(Z, h * k3))
    return move(Z, h * (k1 + 2 * k2 + 2 * k3 + k4) / 6)


def exponential(linear, Z: Tensor, h: float) -> Tensor:
    """exp(hA)Z with the matrix of A formed column by column."""
    samples, size = Z.shape[:-2], Z.shape[-2] * Z.shape[-1]
    basis = torch.eye(size, dtype=Z.dtype).reshape(size, *[1] * len(samples), *Z.shape[-2:])
    columns = torch.stack([linear(direction.expand(Z.shape)) for direction in basis], -1)
    A = columns.reshape(*samples, size, size)
    # torch.linalg.matrix_exp loses digits: 2e-12 at a norm just below 0.05.
    return (torch.from_numpy(scipy.linalg.expm((h * A).numpy())) @ Z.reshape(*samples, size, 1)).reshape(Z.shape)


W = 1 / (2 - 2 ** (1 / 3))
SCHEDULES = {
    "LieTrotter": [("attention", 1.0), ("target", 1.0)],
    "Strang": [("target", 0.5), ("attention", 1.0), ("target", 0.5)],
    "Yoshida": [
        step
        for w in (W, 1 - 2 * W, W)
        for step in (("target", w / 2), ("attention", w), ("target", w / 2))
    ],
}  # fmt: skip


def written_out(problem: Problem, splitting: xf.Splitting, constraint: xf.Constraint, h: float = STEP) -> Tensor:
    """One step, from the formulas alone."""

    def attention(Z: Tensor) -> Tensor:
        return -project(constraint, Z, problem.attention(features(constraint, Z)))

    def target(Z: Tensor) -> Tensor:
        return project(constraint, Z, problem.target(features(constraint, Z)))

    def move(Z: Tensor, V: Tensor) -> Tensor:
        return retract(constraint, Z, V)

    Z, name = place(constraint, problem.Z), type(splitting).__name__
    if name not in SCHEDULES:
        return stepped(name, lambda Z: target(Z) + attention(Z), move, Z, h)
    schedule = SCHEDULES[name]
    if name == "Yoshida":  # neighbouring half-steps of the target are one, as in its definition with a non-linear flow
        (a, b, c), (d, e, f), (g, i, j) = schedule[:3], schedule[3:6], schedule[6:]
        schedule = [a, b, ("target", c[1] + d[1]), e, ("target", f[1] + g[1]), i, j]
    for term, fraction in schedule:
        if term == "target" and splitting.exact and problem.kind not in ("linear", "linear-bias", "bilinear"):
            Z = exponential(problem.target, Z, fraction * h)
        elif term == "target" and splitting.exact:
            Z = Z + fraction * h * problem.target(Z)
        else:
            velocity = attention if term == "attention" else target
            Z = stepped(type(splitting.substep).__name__, velocity, move, Z, fraction * h)
    return Z


def accepted(kind: str, splitting: xf.Splitting, constraint: xf.Constraint) -> bool:
    exact = getattr(splitting, "exact", False)
    return not (exact and (kind == "functional" or not isinstance(constraint, xf.Free)))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", AXES)
class TestTheStepWrittenOut:
    def test_every_splitting_constraint_and_number_of_heads(self, axis, kind, name, generator):
        """Plain with one head and one sample; masked, with an empty distribution, with heads and a batch."""
        # With p = N the velocity of a quadratic model is cubic, and Yoshida's long step back would overflow.
        h = 0.005 if name == "half-square" else STEP
        for heads in (False, True):
            batch = (2,) if heads else ()
            problem = draw(kind, POTENTIALS[name](axis), generator, heads=heads, batch=batch, masked=heads)
            for splitting, constraint in product(SPLITTINGS, CONSTRAINTS):
                if accepted(kind, splitting, constraint):
                    block = problem.block(splitting=splitting, constraint=constraint, step=h)
                    with torch.no_grad():
                        found = block(problem.Z, **problem.inputs())
                    error = relative_error(found, written_out(problem, splitting, constraint, h))
                    assert error <= 1e-12, (heads, splitting, constraint, error)

    def test_another_theta_for_the_target_half_step(self, axis, kind, name, generator):
        problem = draw(kind, POTENTIALS[name](axis), generator, heads=True, batch=(2,), apart=True)
        for splitting in (xf.LieTrotter(), xf.Strang(), xf.LieTrotter(exact=True), xf.Heun()):
            if accepted(kind, splitting, xf.Free()):
                block = problem.block(splitting=splitting, step=STEP)
                assert block.kind == ("game" if "own" in kind else "no common energy")
                found = block(problem.Z, **problem.inputs())
                assert relative_error(found, written_out(problem, splitting, xf.Free())) <= 1e-12, splitting


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("axis", AXES)
def test_the_unsplit_euler_block_is_a_gradient_step(axis, model, heads, generator):
    """Z − h ∂ℓ, with ℓ as the paper defines it and its derivative from autograd."""
    for name in WEIGHTS:
        instance = draw_instance(POTENTIALS[name](axis), model, heads, (2,), generator)
        Z = instance.Z.clone().requires_grad_()
        (slope,) = torch.autograd.grad(instance.reference_energy(Z).sum(), Z)
        block = xf.derive(instance.objective, instance.model, splitting=xf.Euler(), step=STEP)
        found = block(instance.Z, targets=instance.C)
        assert relative_error(found, instance.Z - STEP * slope) <= 1e-12, name
        if block.model.pullback_degree == 0:
            split = xf.derive(instance.objective, instance.model, step=STEP)
            assert relative_error(split(instance.Z, targets=instance.C), instance.Z - STEP * slope) <= 1e-12


def column_softmax(N: Tensor) -> Tensor:
    return torch.exp(N) / torch.exp(N).sum(-2, keepdim=True)


class TestThePaper:
    def test_equation_7_as_printed(self, generator):
        Z, theta, later = (normal(shape, generator) for shape in ((S, F), (K, F), (K, F)))
        C = column_softmax(normal((S, K), generator))
        block = xf.derive(xf.CrossEntropy("sequence"), xf.Linear(theta), target_model=xf.Linear(later))
        half = Z - column_softmax(Z @ theta.T) @ theta
        path = block.trajectory(Z, targets=C)
        assert relative_error(path.Z[1], half) <= 1e-12
        assert relative_error(block(Z, targets=C), half + C @ later) <= 1e-12

    def test_equation_9_as_printed(self, generator):
        Z = normal((S, F), generator)
        phi, later = (normal((F, F), generator, 0.5).tril() for _ in range(2))
        C = column_softmax(normal((S, S), generator))
        block = xf.derive(
            xf.CrossEntropy("sequence"),
            xf.Quadratic.from_factor(phi),
            target_model=xf.Quadratic.from_factor(later),
            printed_form=True,
        )
        X = Z @ phi
        half = Z - 2 * (column_softmax(X @ X.T) @ X) @ phi.T
        expected = half + (C + C.T) @ half @ (later @ later.T)
        assert relative_error(block(Z, targets=C), expected) <= 1e-12
        assert block.kind == "no common energy"

    def test_equation_9_is_not_the_gradient_s_step(self, generator):
        """The default block keeps both p and pᵀ, and differs from what is printed."""
        Z, phi = normal((S, F), generator), normal((F, F), generator, 0.5).tril()
        C = column_softmax(normal((S, S), generator))
        printed, exact = (
            xf.derive(xf.CrossEntropy("sequence"), xf.Quadratic.from_factor(phi), printed_form=form)
            for form in (True, False)
        )
        N = Z @ phi @ phi.T @ Z.T
        half = Z - (column_softmax(N) + column_softmax(N).T) @ Z @ phi @ phi.T
        assert relative_error(exact(Z, targets=C), half + (C + C.T) @ half @ phi @ phi.T) <= 1e-12
        assert relative_error(printed(Z, targets=C), exact(Z, targets=C)) > 1e-3

    def test_self_attention_appears_with_the_own_role(self, generator):
        """Classes axis: a token's own part of the attention term is SA(Zφ)φᵀ, softmax along keys."""
        Z, phi = normal((2, S, F), generator), normal((F, 2), generator)
        block = xf.derive(xf.CrossEntropy("classes"), xf.Quadratic.from_factor(phi, roles="own"), oracle=xf.Uniform())
        attention = xf.self_attention(Z @ phi, axis="classes") @ phi.T
        assert_close(block.trajectory(Z).Z[1], Z - attention, rtol=1e-12, atol=1e-12)


class TestStepsOfTheirOwn:
    @pytest.mark.parametrize("axis", AXES)
    def test_learned_is_its_number(self, axis, generator):
        for kind in KINDS[:-1]:
            problem = draw(kind, xf.LogSumExp(axis), generator)
            for splitting in (xf.LieTrotter(), xf.Strang(exact=True), xf.Yoshida(), xf.RK4()):
                block = problem.block(splitting=splitting, step=xf.LearnedStep(STEP)).double()
                h = float(block.step.log_step.detach().exp())
                assert h == pytest.approx(STEP, rel=1e-6)
                expected = written_out(problem, splitting, xf.Free(), h)
                assert relative_error(block(problem.Z, **problem.inputs()), expected) <= 1e-12

    @pytest.mark.parametrize("axis", AXES)
    def test_learned_per_feature_is_a_diagonal_preconditioner(self, axis, generator):
        for kind in KINDS[:-1]:
            problem = draw(kind, xf.LogSumExp(axis), generator, batch=(2,))
            block = problem.block(step=xf.LearnedStep(STEP, features=F)).double()
            with torch.no_grad():
                block.step.log_step.copy_(normal((F,), generator, 0.5))
            h = torch.exp(block.step.log_step.detach())
            half = problem.Z - problem.attention(problem.Z) * h
            expected = half + problem.target(half) * h
            assert relative_error(block(problem.Z, **problem.inputs()), expected) <= 1e-12

    @pytest.mark.parametrize("constraint", [xf.Free(), xf.Sphere(), xf.Dual(1.3)], ids=repr)
    @pytest.mark.parametrize("kind", KINDS[:-1])
    def test_learned_per_head_weighs_the_energies(self, kind, constraint, generator):
        """A head's step times its terms, for unit time: the flow of ℓ = Σ w_h ℓ_h, whose energy the trace shows."""
        for axis in AXES:
            problem = draw(kind, xf.LogSumExp(axis), generator, heads=True, batch=(2,))
            block = problem.block(step=xf.LearnedStep(STEP, heads=H), constraint=constraint).double()
            with torch.no_grad():
                block.step.log_step.copy_(normal((H,), generator, 0.5))
            w = torch.exp(block.step.log_step.detach())
            flow = block.flow(problem.Z, **problem.inputs())
            X = features(constraint, problem.Z)
            N = problem.logits(X)
            each = (torch.logsumexp(N, problem.potential.dim).sum(-1)) - (problem.C * N).sum((-2, -1))
            assert_close(flow.energy(problem.Z), (each * w).sum(-1), rtol=1e-12, atol=1e-12)

            p = reference_weights(problem.potential, N) * w[:, None, None]
            half = -project(constraint, problem.Z, problem.pulled(X, p, problem.theta))
            half = retract(constraint, problem.Z, half)
            X = features(constraint, half)
            target = project(constraint, half, problem.pulled(X, problem.C * w[:, None, None], problem.theta))
            expected = retract(constraint, half, target)
            assert relative_error(block(problem.Z, **problem.inputs()), expected) <= 1e-12

    def test_learned_stays_positive_whatever_training_does(self, generator):
        problem = draw("linear", xf.LogSumExp("classes"), generator)
        block = problem.block(step=xf.LearnedStep(0.1)).double()
        optimiser = torch.optim.SGD(block.step.parameters(), lr=5.0)
        for sign in (1, 1, 1, -1, -1):
            optimiser.zero_grad()
            (sign * block.step.log_step.exp().sum() * 10).backward()
            optimiser.step()
            h = block.step(block.flow(problem.Z, **problem.inputs()), problem.Z)
            assert h > 0

    @pytest.mark.parametrize("heads", [False, True])
    @pytest.mark.parametrize("axis", AXES)
    def test_certified_never_raises_the_energy(self, axis, heads, generator):
        for kind, name in product(("linear", "linear-bias", "bilinear"), WEIGHTS):
            problem = draw(kind, POTENTIALS[name](axis), generator, heads=heads, batch=(200,))
            for splitting in (xf.LieTrotter(), xf.LieTrotter(exact=True), xf.Euler()):
                block = problem.block(step=xf.CertifiedStep(), splitting=splitting)
                energy = block.trajectory(problem.Z, steps=3, **problem.inputs()).energy
                whole = energy if isinstance(splitting, xf.Euler) else energy[::2]
                assert (whole.diff(dim=0) <= 1e-12 * whole[:-1].abs()).all(), (kind, name)
                assert (whole[-1] < whole[0]).all()

    def test_certified_counts_the_weights_of_heads(self, generator):
        """∂²Σ w_h ℓ_h ≼ max w · L: the heaviest head has the step."""
        problem = draw("linear", xf.LogSumExp("classes"), generator, heads=True, batch=(20,))
        w = torch.tensor([3.0, 30.0, 300.0], dtype=torch.float64)[:, None, None]
        flow = xf.GradientFlow(problem.block().objective, problem.model(problem.theta), problem.C, head_weights=w)
        h = xf.CertifiedStep()(flow, problem.Z)
        assert_close(h, 2 / (300 * torch.linalg.matrix_norm(problem.theta.flatten(0, 1), 2) ** 2))
        assert (flow.energy(problem.Z + h * flow.velocity(problem.Z)) < flow.energy(problem.Z)).all()

    @pytest.mark.parametrize("kind", ["linear", "both", "factor", "bilinear", "functional"])
    @pytest.mark.parametrize("axis", AXES)
    def test_a_line_search_never_raises_the_energy(self, axis, kind, generator):
        for name, splitting in zip(WEIGHTS, (xf.LieTrotter(), xf.Strang(), xf.RK4()) * 2, strict=True):
            problem = draw(kind, POTENTIALS[name](axis), generator, heads=True, batch=(50,))
            block = problem.block(step=xf.LineSearch(initial=4.0), splitting=splitting)
            with torch.no_grad():
                passes = block.trajectory(problem.Z, steps=3, **problem.inputs()).passes
                flow = block.flow(problem.Z, **problem.inputs())
                energy = torch.stack([flow.energy(Z) for Z in passes])
            assert (energy.diff(dim=0) <= 0).all(), (name, splitting)

    def test_any_callable_is_a_rule(self, generator):
        problem = draw("linear", xf.LogSumExp("classes"), generator)
        block = problem.block(step=lambda flow, Z: 0.5 * Z.new_ones(()))
        expected = written_out(problem, xf.LieTrotter(), xf.Free(), 0.5)
        assert relative_error(block(problem.Z, **problem.inputs()), expected) <= 1e-12


def trials(axis: str, kind: str, constraint: xf.Constraint, seed: int, count: int = 250):
    """Random problems that share θ but have their own features and targets, batched."""
    generator = seeded(seed)
    problem = draw(kind, xf.LogSumExp(axis), generator, batch=(count,), heads=True)
    return problem, problem.block(constraint=constraint, splitting=xf.Euler(), step=xf.LineSearch())


def require_monotone(energy: Tensor) -> None:
    """No step raises ℓ by more than a retraction by nothing rounds: Z·‖Z‖/‖Z‖ is Z only up to its last digit."""
    assert (energy.diff(dim=0) <= 1e-15 * energy[:-1].abs()).all()
    assert (energy[-1] < energy[0]).all()


@pytest.mark.parametrize("kind", ["linear", "both"])
@pytest.mark.parametrize("axis", AXES)
class TestConstrained:
    """Two models on two axes with 250 samples each are the 1,000 trials of a constraint."""

    def test_sphere(self, axis, kind):
        for constraint in (xf.Sphere(), xf.Sphere(F**0.5)):
            problem, block = trials(axis, kind, constraint, seed=7)
            with torch.no_grad():
                path = block.trajectory(problem.Z, steps=50, **problem.inputs())
            radii = path.Z.norm(dim=-1)
            assert_close(radii, radii[:1].expand_as(radii), rtol=1e-12, atol=0)
            if constraint.radius is not None:
                assert (radii - constraint.radius).abs().max() <= 1e-12
            flow = block.flow(problem.Z, **problem.inputs())
            for Z in (path.Z[0], path.Z[1], path.Z[-1]):
                V = flow.velocity(Z)
                inner = (V * Z).sum(-1).abs()
                scale = (problem.target(Z) - problem.attention(Z)).norm(dim=-1) * Z.norm(dim=-1)
                assert (inner / scale).max() <= 1e-12
            require_monotone(path.energy)

    def test_dual(self, axis, kind):
        for constraint in (xf.Dual(0.5), xf.Dual(F**0.5)):
            problem, block = trials(axis, kind, constraint, seed=9)
            with torch.no_grad():
                path = block.trajectory(problem.Z, steps=50, **problem.inputs())
            steps = path.times.diff(dim=0)[..., None, None]
            X = features(constraint, path.Z[:-1])
            moved = steps * (problem.target(X) - problem.attention(X))
            assert relative_error(path.Z[1:], path.Z[:-1] + moved) <= 1e-12
            assert_close(path.logits, problem.logits(features(constraint, path.Z)), rtol=1e-12, atol=1e-12)
            require_monotone(path.energy)

    def test_whitened(self, axis, kind):
        problem, block = trials(axis, kind, xf.Whitened(), seed=8)
        with torch.no_grad():
            path = block.trajectory(problem.Z, steps=50, **problem.inputs())
        second_moments = path.Z.mT @ path.Z / S
        assert (second_moments - torch.eye(F, dtype=torch.float64)).abs().max() <= 1e-8
        flow = block.flow(problem.Z, **problem.inputs())
        for Z in (path.Z[0], path.Z[-1]):
            inner = Z.mT @ flow.velocity(Z)
            assert (inner + inner.mT).abs().max() <= 1e-12 * problem.attention(Z).abs().max() * S
        require_monotone(path.energy)


class TestInputs:
    def test_labels_are_one_hot_targets(self, generator):
        for axis, heads in product(AXES, (None, 2)):
            model = xf.Linear(normal((K, F) if heads is None else (heads, K, F), generator))
            block = xf.derive(xf.CrossEntropy(axis), model, step=STEP)
            Z = normal((2, S, F), generator)
            N = model.logits(Z)
            dim = -1 if axis == "classes" else -2
            labels = torch.randint(N.shape[dim], N.select(dim, 0).shape, generator=generator)
            one_hot = torch.zeros_like(N).scatter(dim, labels.unsqueeze(dim), 1)
            assert torch.equal(block(Z, targets=labels), block(Z, targets=one_hot))

    def test_a_context_of_its_own_length(self, generator):
        theta, Z = normal((H, F, G), generator), normal((2, S, F), generator)
        block = xf.derive(xf.CrossEntropy("classes"), xf.Bilinear(theta), oracle=xf.Uniform(), step=STEP)
        for length in (1, 3, 7):
            Y = normal((2, length, G), generator)
            fixed = xf.derive(xf.CrossEntropy("classes"), xf.Bilinear(theta, Y), oracle=xf.Uniform(), step=STEP)
            assert torch.equal(block(Z, context=Y), fixed(Z))
            N = torch.einsum("bsf,hfg,bkg->bhsk", Z, theta, Y)
            R = torch.softmax(N, -1) - 1 / length
            expected = Z - STEP * torch.einsum("bhsk,bkg,hfg->bsf", R, Y, theta)
            assert_close(block(Z, context=Y), expected, rtol=1e-12, atol=1e-12)

    def test_heads_of_low_rank_are_heads_of_full_theta(self, generator):
        phi, Z = normal((H, F, 1), generator), normal((2, S, F), generator)
        for roles in ("both", "own"):
            low = xf.derive(xf.CrossEntropy("classes"), xf.Quadratic.from_factor(phi, roles), oracle=xf.Band())
            full = xf.derive(xf.CrossEntropy("classes"), xf.Quadratic(phi @ phi.mT, roles), oracle=xf.Band())
            assert_close(low(Z), full(Z), rtol=1e-12, atol=1e-12)

    def test_targets_are_asked_for_once_and_stay(self, generator):
        """An oracle that reads the features does so before the first half-step."""
        asked = []

        class Counting(xf.SelfPrediction):
            def forward(self, Z, *rest):
                asked.append(Z)
                return super().forward(Z, *rest)

        model, Z = xf.Linear(normal((K, F), generator)), normal((S, F), generator)
        block = xf.derive(xf.CrossEntropy("classes"), model, oracle=Counting(0.5), splitting=xf.Yoshida())
        block(Z)
        assert len(asked) == 1
        assert torch.equal(asked[0], Z)

    def test_an_oracle_sees_what_the_model_sees(self, generator):
        """Of a dual state that is its features: their length is for nobody to see."""
        seen = []

        class Counting(xf.SelfPrediction):
            def forward(self, Z, N, *rest):
                seen.append((Z, N))
                return super().forward(Z, N, *rest)

        model, Z = xf.Linear(normal((K, F), generator)), normal((S, F), generator)
        block = xf.derive(xf.CrossEntropy("classes"), model, oracle=Counting(0.5), constraint=xf.Dual(1.3), step=STEP)
        step = block(Z) - Z
        ((X, N),) = seen
        assert_close(X, features(block.constraint, Z), rtol=1e-13, atol=1e-13)
        assert_close(N, X @ model.theta.mT, rtol=1e-13, atol=1e-13)
        assert_close(block(5 * Z) - 5 * Z, step, rtol=1e-12, atol=1e-13)

    def test_what_it_discretises(self, generator):
        theta = normal((F, F), generator)
        loss = xf.CrossEntropy("classes")
        assert xf.derive(loss, xf.Quadratic(theta)).kind == "gradient flow"
        assert xf.derive(loss, xf.Quadratic(theta, roles="own")).kind == "game"
        assert xf.derive(loss, xf.Quadratic(theta), printed_form=True).kind == "no common energy"
        assert xf.derive(loss, xf.Linear(theta), target_model=xf.Linear(theta)).kind == "no common energy"

    def test_labels_enter_through_given_alone(self, generator):
        theta = normal((F, F), generator)
        for oracle in (xf.Given(), xf.Uniform(), xf.SelfPrediction()):
            block = xf.derive(xf.CrossEntropy("classes"), xf.Linear(theta), oracle=oracle)
            assert block.uses_labels == isinstance(oracle, xf.Given)
