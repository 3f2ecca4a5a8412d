"""The feature gradient against differences without autograd, against autograd, and against the paper's formulas."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import xentflow as xf
from instances import (
    AXES,
    BATCHES,
    HEADS,
    MODELS,
    POTENTIALS,
    SmallNetwork,
    along,
    central_differences,
    draw_instance,
    draw_targets,
    normal,
    reference_weights,
    relative_error,
    uniform,
)
from xentflow import gradient
from xentflow.gradient import attention_term, target_term
from xentflow.kernels import dispatch
from xentflow.masks import Masking
from xentflow.models import Factors


def each(name, values):
    if isinstance(values, dict):
        return pytest.mark.parametrize(name, values.values(), ids=values.keys())
    return pytest.mark.parametrize(name, values)


every_potential = pytest.mark.parametrize("potential", POTENTIALS)
every_axis = each("axis", AXES)


@every_potential
@pytest.mark.parametrize("model", MODELS)
@every_axis
@each("heads", HEADS)
@each("batch", BATCHES)
class TestEveryCombination:
    @pytest.fixture
    def instance(self, potential, model, axis, heads, batch, generator):
        return draw_instance(POTENTIALS[potential](axis), model, heads, batch, generator)

    def test_total_is_the_derivative_by_differences_and_by_autograd(self, instance):
        Z, model = instance.Z, instance.model
        total = xf.feature_gradient(instance.objective, model, Z, instance.C).total
        differences = central_differences(instance.reference_energy, Z, batch_ndim=Z.ndim - 2)
        errors = torch.linalg.matrix_norm(total - differences) / torch.linalg.matrix_norm(differences)
        assert errors.max() <= 1e-7
        Z = Z.clone().requires_grad_()
        energy = instance.energy(Z, model)
        assert_close(energy, instance.reference_energy(Z), rtol=1e-12, atol=1e-11)
        (by_autograd,) = torch.autograd.grad(energy.sum(), Z)
        assert relative_error(total, by_autograd) <= 1e-12
        without_logits = xf.feature_gradient(instance.objective, model, instance.Z, instance.C, backend="chunked").total
        assert relative_error(without_logits, by_autograd) <= 1e-12

    def test_energy_passes_gradcheck_and_gradgradcheck(self, instance, generator):
        model = instance.model.requires_grad_(False)
        Z = instance.Z.clone().requires_grad_()
        seed = normal(Z.shape[:-2], generator).requires_grad_()
        assert gradcheck(lambda Z: instance.energy(Z, model), Z, fast_mode=True)
        assert gradgradcheck(lambda Z: instance.energy(Z, model), Z, grad_outputs=seed, fast_mode=True)


@every_potential
@pytest.mark.parametrize("model", MODELS)
@every_axis
def test_terms_are_pullbacks_of_weights_and_of_targets(potential, model, axis, generator):
    instance = draw_instance(POTENTIALS[potential](axis), model, 4, (2,), generator)
    Z = instance.Z.clone().requires_grad_()
    N = instance.case.logits(Z, *instance.tensors)
    g = xf.feature_gradient(instance.objective, instance.model, instance.Z, instance.C)
    p = reference_weights(instance.potential, N.detach())
    for term, M in ((g.attention, p), (g.target, instance.C)):
        (expected,) = torch.autograd.grad((M * N).sum(), Z, retain_graph=True)
        assert relative_error(term, expected) <= 1e-12
    assert torch.equal(g.total, g.attention - g.target)


@every_axis
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_head_weights_weigh_the_energy_of_each_head(axis, model, backend, generator):
    instance = draw_instance(xf.LogSumExp(axis), model, 4, (2,), generator)
    weights, loss, built = uniform((4, 1, 1), generator), instance.objective, instance.model
    N = instance.case.logits(instance.Z, *instance.tensors)
    labels = torch.randint(N.shape[along(axis)], N.select(along(axis), 0).shape, generator=generator)
    for C in (instance.C, labels):
        Z = instance.Z.clone().requires_grad_()
        (expected,) = torch.autograd.grad((loss.value(built.logits(Z), C) * weights.flatten()).sum(), Z)
        attention = attention_term(loss, built, instance.Z, head_weights=weights, backend=backend)
        target = target_term(loss, built, instance.Z, C, head_weights=weights)
        assert relative_error(attention - target, expected) <= 1e-12
    if model.startswith("quadratic"):
        printed = 2 * built.query_pullback(instance.Z, weights * reference_weights(instance.potential, N))
        found = attention_term(loss, built, instance.Z, head_weights=weights, printed=True, backend=backend)
        assert relative_error(found, printed) <= 1e-12


@every_axis
@pytest.mark.parametrize("roles", ["both", "own"])
@pytest.mark.parametrize("model", ["quadratic", "quadratic-factor", "quadratic-two-factors"])
@each("heads", HEADS)
class TestEachRoleWithoutLogits:
    """What the two roles of a token give where no matrix of logits is kept, and no matrix of targets either."""

    @pytest.fixture
    def instance(self, model, axis, heads, generator):
        return draw_instance(xf.LogSumExp(axis), model, heads, (2,), generator)

    def test_attention(self, instance, roles, axis):
        model = instance.case.build(*instance.tensors, roles=roles)
        p = reference_weights(instance.potential, instance.case.logits(instance.Z, *instance.tensors))
        found = attention_term(instance.objective, model, instance.Z, backend="chunked")
        assert relative_error(found, model.pullback(instance.Z, p, axis)) <= 1e-12

    def test_labels(self, instance, roles, axis, generator):
        model = instance.case.build(*instance.tensors, roles=roles)
        dim, S = along(axis), instance.Z.shape[-2]
        labels = torch.randint(S, instance.C.select(dim, 0).shape, generator=generator)
        one_hot = torch.zeros_like(instance.C).scatter(dim, labels.unsqueeze(dim), 1)
        found = target_term(instance.objective, model, instance.Z, labels)
        assert relative_error(found, model.pullback(instance.Z, one_hot, axis)) <= 1e-12


def maskings(like, axis, generator):
    """Masks of every shape that goes with logits ``(2, H, S, K)``; each distribution keeps an entry."""
    S, K = like.shape[-2:]
    dense = uniform(like.shape, generator) < 0.6
    dense.select(along(axis), 1).fill_(True)
    rows, columns = (torch.ones(2, 1, length, dtype=torch.bool) for length in (S, K))
    rows[1, 0, 2:], columns[0, 0, 3:] = False, False
    return {
        "dense": Masking(dense),
        "one for all heads": Masking(dense[:, :1]),
        "one for all": Masking(dense[0, 0]),
        "padding": Masking(None, rows, columns),
        "causal": Masking(None, rows, rows, causal=True) if S == K else Masking(dense, rows, columns),
    }


@each("kind", ["dense", "one for all heads", "one for all", "padding", "causal"])
@pytest.mark.parametrize("model", MODELS)
@every_axis
def test_heads_one_after_another_are_heads_at_once(kind, model, axis, generator, monkeypatch):
    instance = draw_instance(xf.LogSumExp(axis), model, 4, (2,), generator)
    like = instance.model.logits_like(instance.Z)
    masking = maskings(like, axis, generator)[kind]
    labels = torch.randint(like.shape[along(axis)], like.select(along(axis), 0).shape, generator=generator)
    weights = uniform((4, 1, 1), generator)
    arguments = instance.objective, instance.model, instance.Z
    expected = attention_term(*arguments, masking, weights, backend="reference")
    assert relative_error(attention_term(*arguments, masking, weights, backend="chunked"), expected) <= 1e-12
    at_once = target_term(*arguments, labels, masking, weights)
    monkeypatch.setattr(dispatch, "FEW", 0)
    assert relative_error(target_term(*arguments, labels, masking, weights), at_once) <= 1e-12


class Scaled(xf.Model):
    """N = βₕ Z/2 θₕᵀ, with no more than a model has to say, and its factors."""

    def __init__(self, theta, beta):
        self.theta, self.beta, self.heads = theta, beta, len(theta)

    def logits(self, Z):
        return self.beta * torch.einsum("...sf,hkf->...hsk", Z, self.theta) / 2

    def factors(self, Z, axis):
        return Factors((self.beta * Z.unsqueeze(-3)) / 2, self.theta, None, lambda M: (self.beta * M / 2).sum(-3))

    def tensors(self):
        return [self.theta, self.beta]

    def _logits_shape(self, Z):
        return (*Z.shape[:-2], self.heads, Z.shape[-2], self.theta.shape[-2])


class Halved(xf.Linear):
    """A model of the package with other logits, and so with other factors."""

    def logits(self, Z):
        return super().logits(Z) / 2

    def pullback(self, Z, M, axis=None):
        return super().pullback(Z, M) / 2

    def factors(self, Z, axis):
        whole = super().factors(Z, axis)
        return Factors(whole.q / 2, whole.k, None, lambda M: whole.pull_rows(M) / 2)


@pytest.mark.parametrize("kind", ["scaled", "halved"])
@every_axis
def test_models_of_ones_own_with_heads_of_many_logits(kind, axis, generator, monkeypatch):
    theta, Z = normal((3, 5, 2), generator), normal((2, 4, 2), generator)
    model = Halved(theta) if kind == "halved" else Scaled(theta, uniform((3, 1, 1), generator))
    like = model.logits_like(Z)
    labels = torch.randint(like.shape[along(axis)], like.select(along(axis), 0).shape, generator=generator)
    expected = xf.feature_gradient(xf.CrossEntropy(axis), model, Z, labels, backend="reference")
    moving = Z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(xf.CrossEntropy(axis).value(model.logits(moving), labels).sum(), moving)
    assert relative_error(expected.total, slope) <= 1e-12
    monkeypatch.setattr(dispatch, "FEW", 0)
    found = xf.feature_gradient(xf.CrossEntropy(axis), model, Z, labels)
    assert relative_error(found.attention, expected.attention) <= 1e-12
    assert relative_error(found.target, expected.target) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", "both", "own", "factor"])
@every_axis
def test_heads_one_after_another_lose_no_more_digits_than_at_once(kind, axis, dtype, generator, monkeypatch):
    H, S, F, K = 32, 48, 32, 40
    theta = normal((H, *{"linear": (K, F), "factor": (F, 8)}.get(kind, (F, F))), generator) / F**0.5
    theta, Z = theta.to(dtype), normal((S, F), generator).to(dtype)

    def model(theta):
        if kind == "factor":
            return xf.Quadratic.from_factor(theta)
        return xf.Linear(theta) if kind == "linear" else xf.Quadratic(theta, roles=kind)

    objective = xf.CrossEntropy(axis)
    expected = attention_term(objective, model(theta.double()), Z.double(), backend="reference")
    in_turn = attention_term(objective, model(theta), Z, backend="chunked")
    monkeypatch.setattr(Masking, "of_head", None)
    monkeypatch.setattr(gradient, "is_plain", lambda like, backend: like.ndim < 3)
    at_once = attention_term(objective, model(theta), Z, backend="chunked")
    assert in_turn.dtype == at_once.dtype == dtype
    assert relative_error(in_turn.double(), expected) <= 1.1 * relative_error(at_once.double(), expected)


@pytest.mark.parametrize("roles", ["both", "own"])
@pytest.mark.parametrize("model", ["linear-bias", "quadratic", "quadratic-factor", "quadratic-two-factors", "bilinear"])
@every_axis
def test_heads_one_after_another_pass_gradcheck(model, roles, axis, generator, monkeypatch):
    monkeypatch.setattr(dispatch, "FEW", 0)
    instance = draw_instance(xf.LogSumExp(axis), model, 2, (), generator)
    like = instance.model.logits_like(instance.Z)
    labels = torch.randint(like.shape[along(axis)], like.select(along(axis), 0).shape, generator=generator)
    leaves = [X.clone().requires_grad_() for X in (instance.Z, *instance.tensors)]
    how = {"roles": roles} if model.startswith("quadratic") else {}

    def total(Z, *tensors):
        return xf.feature_gradient(instance.objective, instance.case.build(*tensors, **how), Z, labels).total

    assert gradcheck(total, leaves, fast_mode=True)
    seed = normal(instance.Z.shape, generator).requires_grad_()
    assert gradgradcheck(total, leaves, grad_outputs=seed, fast_mode=True)


@every_potential
@pytest.mark.parametrize("model", ["linear-bias", "quadratic", "quadratic-factor", "bilinear"])
@every_axis
def test_energy_and_gradient_are_differentiable_in_theta(potential, model, axis, generator):
    instance = draw_instance(POTENTIALS[potential](axis), model, None, (), generator)
    tensors = [tensor.clone().requires_grad_() for tensor in instance.tensors]
    Z = instance.Z.clone().requires_grad_()

    def energy(Z, *tensors):
        return instance.energy(Z, instance.case.build(*tensors))

    def total(Z, *tensors):
        return xf.feature_gradient(instance.objective, instance.case.build(*tensors), Z, instance.C).total

    assert gradcheck(energy, (Z, *tensors), fast_mode=True)
    assert gradcheck(total, (Z, *tensors), fast_mode=True)
    seed = normal((), generator).requires_grad_()
    assert gradgradcheck(energy, (Z, *tensors), grad_outputs=seed, fast_mode=True)


@every_potential
@every_axis
@each("heads", HEADS)
def test_quadratic_gradient_is_the_transposed_problem_on_the_other_axis(potential, axis, heads, generator):
    other = AXES[1 - AXES.index(axis)]
    here, there = (POTENTIALS[potential](a) for a in (axis, other))
    instance = draw_instance(here, "quadratic", heads, (2,), generator)
    (theta,) = instance.tensors
    g = xf.feature_gradient(xf.Objective(here), xf.Quadratic(theta), instance.Z, instance.C)
    transposed = xf.feature_gradient(xf.Objective(there), xf.Quadratic(theta.mT), instance.Z, instance.C.mT)
    assert relative_error(g.attention, transposed.attention) <= 1e-12
    assert relative_error(g.target, transposed.target) <= 1e-12


class TestFormulasOfThePaper:
    @every_axis
    def test_linear(self, axis, generator):
        Z, theta = normal((6, 3), generator), normal((5, 3), generator)
        C = normal((6, 5), generator).softmax(-2 if axis == "sequence" else -1)
        g = xf.feature_gradient(xf.CrossEntropy(axis), xf.Linear(theta), Z, C)
        assert_close(g.attention, xf.cross_attention(Z, theta, axis=axis), rtol=1e-12, atol=1e-12)
        assert_close(g.target, torch.einsum("ik,kf->if", C, theta), rtol=1e-12, atol=1e-12)

    @every_axis
    @pytest.mark.parametrize("rank", [2, 5])
    def test_query_part_of_the_quadratic_attention_is_self_attention_of_the_projection(self, axis, rank, generator):
        Z, phi = normal((6, 3), generator), normal((3, rank), generator)
        model = xf.Quadratic.from_factor(phi)
        p = xf.LogSumExp(axis).gradient(model.logits(Z))
        by_self_attention = xf.self_attention(Z @ phi, axis=axis) @ phi.T
        assert relative_error(p @ Z @ (phi @ phi.T), by_self_attention) <= 1e-12
        assert relative_error(model.query_pullback(Z, p), by_self_attention) <= 1e-12

    @every_axis
    @every_potential
    @each("heads", HEADS)
    def test_printed_form_is_what_the_paper_prints(self, potential, axis, heads, generator):
        instance = draw_instance(POTENTIALS[potential](axis), "quadratic", heads, (2,), generator)
        Z, C, (theta,) = instance.Z, instance.C, instance.tensors
        p = reference_weights(instance.potential, instance.case.logits(Z, theta))
        if heads is None:
            p, C, theta = p.unsqueeze(-3), C.unsqueeze(-3), theta.unsqueeze(-3)
        printed = xf.printed_form(instance.objective, instance.model, Z, instance.C)
        query = 2 * torch.einsum("bhij,bjg,hfg->bif", p, Z, theta)
        target = torch.einsum("bhij,bjg,hfg->bif", C, Z, theta) + torch.einsum("bhji,bjg,hfg->bif", C, Z, theta.mT)
        assert relative_error(printed.attention, query) <= 1e-12
        assert relative_error(printed.target, target) <= 1e-12
        assert relative_error(printed.total, query - target) <= 1e-12

    @every_axis
    def test_printed_form_of_what_a_mask_leaves(self, axis, generator):
        Z, theta, C = normal((5, 3), generator), normal((3, 3), generator), torch.eye(5, dtype=torch.float64)
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        weights = (Z @ theta @ Z.T).masked_fill(~mask, -1e300).softmax(-2 if axis == "sequence" else -1)
        printed = xf.printed_form(xf.CrossEntropy(axis), xf.Quadratic(theta), Z, C, mask)
        assert relative_error(printed.attention, 2 * weights @ Z @ theta.T) <= 1e-12

    def test_printed_form_misses_the_gradient_by_about_a_third(self, generator):
        errors = []
        for _ in range(30):
            Z, half = normal((10, 16, 8), generator), normal((8, 8), generator)
            C = torch.eye(16, dtype=torch.float64)[torch.randint(16, (10, 16), generator=generator)].mT
            arguments = xf.CrossEntropy("sequence"), xf.Quadratic((half + half.T) / 2), Z, C
            printed, exact = xf.printed_form(*arguments).total, xf.feature_gradient(*arguments).total
            errors.append(torch.linalg.matrix_norm(printed - exact) / torch.linalg.matrix_norm(exact))
        assert 0.3 < torch.cat(errors).median() < 0.45

    def test_printed_form_is_exact_where_p_is_symmetric(self, generator):
        # With p = N the weights are as symmetric as θ: the one potential for which the paper's step holds.
        half = normal((3, 3), generator)
        arguments = (
            xf.Objective(xf.HalfSquare("sequence")),
            xf.Quadratic(half + half.T),
            normal((5, 3), generator),
            normal((5, 5), generator),
        )
        assert relative_error(xf.printed_form(*arguments).total, xf.feature_gradient(*arguments).total) <= 1e-12


@every_axis
@every_potential
@pytest.mark.parametrize("model", ["quadratic", "quadratic-factor", "quadratic-two-factors"])
@each("heads", HEADS)
class TestOwnRole:
    @pytest.fixture
    def instance(self, potential, model, axis, heads, generator):
        return draw_instance(POTENTIALS[potential](axis), model, heads, (2,), generator)

    @pytest.fixture
    def own(self, instance):
        model = instance.case.build(*instance.tensors, roles="own")
        return xf.feature_gradient(instance.objective, model, instance.Z, instance.C)

    def test_every_token_descends_its_own_distribution_with_the_rest_held_fixed(self, instance, own, axis, heads):
        Z, theta = instance.Z, _theta_of(instance)
        (per_distribution, expected) = instance.objective.per_distribution, torch.zeros_like(Z)
        for token in range(Z.shape[-2]):
            mine = Z[..., token, :].clone().requires_grad_()
            moved = torch.cat([Z[..., :token, :], mine.unsqueeze(-2), Z[..., token + 1 :, :]], -2)
            moved, fixed = (X if heads is None else X.unsqueeze(-3) for X in (moved, Z.detach()))
            # The distribution a token owns is its row on the classes axis and its column on the sequence axis; what
            # it meets there, its own other role included, is a copy that does not move.
            N = moved @ theta @ fixed.mT if axis == "classes" else fixed @ theta @ moved.mT
            loss = per_distribution(N, instance.C)[..., token].sum()
            (expected[..., token, :],) = torch.autograd.grad(loss, mine)
        assert relative_error(own.total, expected) <= 1e-12

    def test_strictly_fixing_only_the_others_adds_a_diagonal_term(self, instance, own, axis, heads):
        Z, theta = instance.Z, _theta_of(instance)
        expected = torch.zeros_like(Z)
        for token in range(Z.shape[-2]):
            mine = Z[..., token, :].clone().requires_grad_()
            moved = torch.cat([Z[..., :token, :], mine.unsqueeze(-2), Z[..., token + 1 :, :]], -2)
            moved = moved if heads is None else moved.unsqueeze(-3)
            loss = instance.objective.per_distribution(moved @ theta @ moved.mT, instance.C)[..., token].sum()
            (expected[..., token, :],) = torch.autograd.grad(loss, mine)
        residual = instance.objective.residual(instance.case.logits(Z, *instance.tensors), instance.C)
        diagonal = residual.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        met = (Z if heads is None else Z.unsqueeze(-3)) @ (theta if axis == "classes" else theta.mT)
        extra = diagonal * met
        assert relative_error(own.total + (extra if heads is None else extra.sum(-3)), expected) <= 1e-12

    def test_both_roles_are_the_sum_of_own_and_other(self, instance, own, axis):
        whole = xf.feature_gradient(instance.objective, instance.model, instance.Z, instance.C)
        model, Z = instance.model, instance.Z
        other = model.key_pullback if axis == "classes" else model.query_pullback
        p = reference_weights(instance.potential, instance.case.logits(Z, *instance.tensors))
        assert relative_error(own.attention + other(Z, p), whole.attention) <= 1e-12
        assert relative_error(own.target + other(Z, instance.C), whole.target) <= 1e-12


@every_axis
@every_potential
@pytest.mark.parametrize("model", ["linear", "quadratic", "functional"])
@each("heads", HEADS)
class TestMasked:
    def test_gradient_is_the_derivative_of_the_masked_energy(self, potential, axis, model, heads, generator):
        instance = draw_instance(POTENTIALS[potential](axis), model, heads, (2,), generator)
        dim = -2 if axis == "sequence" else -1
        mask = uniform(instance.C.shape, generator) < 0.6
        # One distribution of every sample has nothing left at all.
        mask.select(-1 if axis == "sequence" else -2, 0).fill_(False)
        C = instance.C.masked_fill(~mask, 0)
        if potential not in ("softplus", "half-square"):
            C = C / C.sum(dim, keepdim=True).clamp_min(1e-300)
        Z = instance.Z.clone().requires_grad_()
        built = instance.model
        total = xf.feature_gradient(instance.objective, built, instance.Z, C, mask).total
        (by_autograd,) = torch.autograd.grad(instance.objective.value(built.logits(Z), C, mask).sum(), Z)
        assert relative_error(total, by_autograd) <= 1e-12


@every_potential
@every_axis
def test_own_role_under_a_causal_mask_never_looks_at_the_future(potential, axis, generator):
    omega = POTENTIALS[potential](axis)
    theta, Z = normal((3, 3), generator), normal((6, 3), generator)
    past = torch.ones(6, 6, dtype=torch.bool).tril()
    mask = past if axis == "classes" else past.mT
    C = draw_targets(omega, (6, 6), generator) * mask
    if potential not in ("softplus", "half-square"):
        C = C / C.sum(omega.dim, keepdim=True)
    model = xf.Quadratic(theta, roles="own")
    before = xf.feature_gradient(xf.Objective(omega), model, Z, C, mask).total
    changed = Z.clone()
    changed[4:] = normal((2, 3), generator)
    after = xf.feature_gradient(xf.Objective(omega), model, changed, C, mask).total
    assert_close(after[:4], before[:4], rtol=1e-12, atol=1e-12)
    assert relative_error(after[4:], before[4:]) > 1e-3


@every_axis
def test_integer_labels_and_shared_targets_give_the_gradient_of_the_matrix_they_stand_for(axis, generator):
    Z, theta = normal((2, 4, 3), generator), normal((5, 3), generator)
    loss, model = xf.CrossEntropy(axis), xf.Linear(theta)
    labels = torch.randint(0, 4 if axis == "sequence" else 5, (2, 5 if axis == "sequence" else 4), generator=generator)
    one_hot = torch.nn.functional.one_hot(labels, 4 if axis == "sequence" else 5).double()
    C = one_hot.mT if axis == "sequence" else one_hot
    expected = xf.feature_gradient(loss, model, Z, C)
    assert torch.equal(xf.feature_gradient(loss, model, Z, labels).total, expected.total)
    shared = xf.feature_gradient(loss, model, Z, C[0])
    assert_close(shared.total[0], expected.total[0], rtol=1e-12, atol=1e-13)
    assert torch.equal(shared.total, xf.feature_gradient(loss, model, Z, C[:1].expand(2, -1, -1)).total)


@every_potential
@pytest.mark.parametrize("model", MODELS)
def test_batch_of_n_is_n_batches_of_one(potential, model, generator):
    instance = draw_instance(POTENTIALS[potential]("sequence"), model, 4, (3,), generator)
    whole = xf.feature_gradient(instance.objective, instance.model, instance.Z, instance.C).total
    for sample in range(3):
        tensors = instance.tensors
        if model == "bilinear":
            tensors = (tensors[0], tensors[1][sample])
        alone = instance.case.build(*tensors)
        one = xf.feature_gradient(instance.objective, alone, instance.Z[sample], instance.C[sample]).total
        assert relative_error(whole[sample], one) <= 1e-12


def test_gradient_is_itself_trainable(generator):
    """A loss on the velocity reaches the network's parameters: what training a derived block needs."""
    network = SmallNetwork(normal((4, 4), generator), normal((3, 6), generator), normal((6, 5), generator))
    Z, C = normal((4, 3), generator), normal((4, 5), generator).softmax(-1)
    xf.feature_gradient(xf.CrossEntropy("classes"), xf.Functional(network), Z, C).total.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in network.parameters())


def _theta_of(instance):
    first, *second = instance.tensors
    if instance.case is MODELS["quadratic"]:
        return first
    return first @ (second[0] if second else first).mT
