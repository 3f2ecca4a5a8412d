"""The flow Ż = target − attention: its two terms, its energy, and how fast the energy falls."""

import pytest
import torch
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES, KINDS, TinyNetwork, normal, potentials, random_flow, random_targets, seeded

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
EVERY_KIND = (*KINDS, "own")


def fall_along(flow: xf.GradientFlow, Z: torch.Tensor, reach: float = 1e-3) -> torch.Tensor:
    """−dℓ/dt by fourth-order central differences along the velocity: no derivative code takes part."""
    V = flow.velocity(Z)
    # One scale a sample, so that the truncation error does not depend on how fast the sample moves.
    t = (reach / torch.linalg.vector_norm(V, dim=(-2, -1)))[..., None, None]

    def central(k: int) -> torch.Tensor:
        return (flow.energy(Z + k * t * V) - flow.energy(Z - k * t * V)) / (2 * k)

    return -(4 * central(1) - central(2)) / (3 * t[..., 0, 0])


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("kind", KINDS)
class TestGradientFlow:
    def test_velocity_is_minus_the_gradient_of_the_energy(self, kind, axis, batch, heads):
        for index, potential in enumerate(potentials(axis)):
            flow, Z = random_flow(kind, axis, 10 + index, potential=potential, batch=batch, heads=heads)
            leaf = Z.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(flow.energy(leaf).sum(), leaf)
            assert_close(flow.velocity(Z), -gradient, **TIGHT)
            terms = xf.feature_gradient(flow.objective, flow.model, Z, flow.targets(Z))
            assert_close(flow.velocity(Z), -terms.total, **TIGHT)

    def test_energy_falls_by_the_dissipation_and_not_by_half_of_it(self, kind, axis, batch, heads):
        for index, potential in enumerate([xf.LogSumExp(axis), xf.Softplus(axis), xf.HalfSquare(axis)]):
            flow, Z = random_flow(kind, axis, 20 + index, potential=potential, batch=batch, heads=heads)
            measured, stated = fall_along(flow, Z), flow.dissipation(Z)
            assert stated.shape == batch
            assert_close(measured, stated, rtol=1e-7, atol=0)
            assert (measured / (stated / 2) > 1.9).all()

    def test_a_batch_is_so_many_samples(self, kind, axis, batch, heads):
        flow, Z = random_flow(kind, axis, 30, batch=(4,), heads=heads)
        singles = []
        for index in range(4):
            model = flow.model
            if kind == "bilinear":
                model = xf.Bilinear(model.theta, model.context[index])
            singles.append(xf.GradientFlow(flow.objective, model, flow.targets(Z)[index]))
        for quantity in ("energy", "dissipation", "velocity"):
            one_by_one = [getattr(single, quantity)(Z[index]) for index, single in enumerate(singles)]
            assert_close(getattr(flow, quantity)(Z), torch.stack(one_by_one), **TIGHT)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_two_terms_sum_to_the_velocity(kind, axis):
    for constraint in (xf.Free(), xf.Sphere(), xf.Dual(1.5), xf.Whitened()):
        flow, Z = random_flow(kind, axis, 40, constraint=constraint, heads=2, batch=(3,))
        attention, target = flow.terms
        assert (attention.name, target.name) == ("attention", "target")
        assert_close(attention.velocity(Z) + target.velocity(Z), flow.velocity(Z), **TIGHT)


@pytest.mark.parametrize("axis", AXES)
def test_terms_have_the_signs_of_target_minus_attention(axis):
    flow, Z = random_flow("linear", axis, 41)
    theta, bias = flow.model.theta, flow.model.bias
    p = torch.softmax(Z @ theta.mT + bias, -2 if axis == "sequence" else -1)
    assert_close(flow.terms[0].velocity(Z), -p @ theta, **TIGHT)
    assert_close(flow.terms[1].velocity(Z), flow.targets(Z) @ theta, **TIGHT)


@pytest.mark.parametrize("axis", AXES)
def test_heads_add_up(axis):
    heads = 4
    for kind in ("linear", "quadratic"):
        flow, Z = random_flow(kind, axis, 50, heads=heads, batch=(2,))
        C = flow.targets(Z)
        energy, velocity = 0, 0
        for head in range(heads):
            theta = flow.model.theta[head]
            model = xf.Linear(theta, flow.model.bias[head]) if kind == "linear" else xf.Quadratic(theta)
            single = xf.GradientFlow(flow.objective, model, C[:, head])
            energy, velocity = energy + single.energy(Z), velocity + single.velocity(Z)
        assert_close(flow.energy(Z), energy, **TIGHT)
        assert_close(flow.velocity(Z), velocity, **TIGHT)


@pytest.mark.parametrize("axis", AXES)
def test_own_role_descends_each_tokens_own_energy(axis):
    """The velocity is the gradient of ℓ through one side of ZθZᵀ only, the other tokens' side held fixed."""
    flow, Z = random_flow("own", axis, 60)
    theta, C = flow.model.theta, flow.targets(Z)
    moving = Z.clone().requires_grad_()
    N = moving @ theta @ Z.mT if axis == "classes" else Z @ theta @ moving.mT
    dim = -1 if axis == "classes" else -2
    (gradient,) = torch.autograd.grad((torch.logsumexp(N, dim).sum() - (C * N).sum()), moving)
    assert_close(flow.velocity(Z), -gradient, **TIGHT)


@pytest.mark.parametrize("axis", AXES)
def test_dissipation_refuses_a_game(axis):
    flow, Z = random_flow("own", axis, 61)
    assert not flow.is_gradient
    with pytest.raises(xf.XentflowError, match="dissipation: expected a gradient flow"):
        flow.dissipation(Z)


@pytest.mark.parametrize("axis", AXES)
def test_printed_form_is_the_papers_and_no_gradient_flow(axis):
    generator = seeded(70)
    phi, Z = normal(generator, 3, 2), normal(generator, 5, 3)
    theta, dim = phi @ phi.mT, -2 if axis == "sequence" else -1
    C = random_targets(xf.LogSumExp(axis), generator, 5, 5)
    flow = xf.GradientFlow(xf.CrossEntropy(axis), xf.Quadratic.from_factor(phi), C, printed_form=True)
    X = Z @ phi
    printed = -2 * torch.softmax(X @ X.mT, dim) @ X @ phi.mT + (C + C.mT) @ Z @ theta
    assert_close(flow.velocity(Z), printed, **TIGHT)
    exact = xf.GradientFlow(flow.objective, flow.model, C).velocity(Z)
    assert (printed - exact).norm() > 0.05 * exact.norm()
    assert not flow.is_gradient
    with pytest.raises(xf.XentflowError, match="printed form"):
        flow.dissipation(Z)


@pytest.mark.parametrize("kind", ["linear", "own"])
def test_printed_form_exists_for_the_printed_model_only(kind):
    flow, Z = random_flow(kind, "classes", 71)
    with pytest.raises(xf.XentflowError, match='printed_form: expected a Quadratic model with roles="both"'):
        xf.GradientFlow(flow.objective, flow.model, flow.targets(Z), printed_form=True)


@pytest.mark.parametrize("axis", AXES)
def test_a_masked_flow_is_the_gradient_flow_of_the_masked_energy(axis):
    flow, Z = random_flow("quadratic", axis, 80)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    C = flow.targets(Z) * mask
    C = C / C.sum(-1 if axis == "classes" else -2, keepdim=True)
    masked = xf.GradientFlow(flow.objective, flow.model, C, mask=mask)
    N = flow.model.logits(Z)
    present = N.masked_fill(~mask, -torch.inf)
    dim = -1 if axis == "classes" else -2
    assert_close(masked.energy(Z), torch.logsumexp(present, dim).sum() - (C * N).sum(), **TIGHT)
    leaf = Z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(masked.energy(leaf), leaf)
    assert_close(masked.velocity(Z), -gradient, **TIGHT)
    assert_close(fall_along(masked, Z), masked.dissipation(Z), rtol=1e-7, atol=0)


def test_targets_outlive_the_transform_they_were_first_seen_in():
    labels, Z = torch.tensor([0, 3, 1, 2, 2]), normal(seeded(93), 3, 5, 3)
    model = xf.Linear(normal(seeded(94), 4, 3))
    expected = xf.GradientFlow(xf.CrossEntropy("classes"), model, labels).energy(Z)
    flow = xf.GradientFlow(xf.CrossEntropy("classes"), model, labels)
    assert_close(torch.func.vmap(flow.energy)(Z), expected, **TIGHT)
    assert_close(flow.energy(Z[0]), expected[0], **TIGHT)


@pytest.mark.parametrize("axis", AXES)
def test_labels_mean_one_hot_targets(axis):
    flow, Z = random_flow("linear", axis, 90)
    S, K = 5, 4
    if axis == "classes":
        labels = torch.tensor([0, 3, 1, 2, 2])
        one_hot = torch.eye(K, dtype=torch.float64)[labels]
    else:
        labels = torch.tensor([4, 0, 2, 1])
        one_hot = torch.eye(S, dtype=torch.float64)[labels].mT
    by_label = xf.GradientFlow(flow.objective, flow.model, labels)
    by_matrix = xf.GradientFlow(flow.objective, flow.model, one_hot)
    assert_close(by_label.velocity(Z), by_matrix.velocity(Z), rtol=0, atol=0)
    assert_close(by_label.energy(Z), by_matrix.energy(Z), rtol=0, atol=0)


def test_shared_targets_serve_any_batch():
    flow, Z = random_flow("linear", "classes", 91)
    batch = torch.stack([Z, 2 * Z, -Z])
    assert_close(flow.energy(batch)[0], flow.energy(Z), **TIGHT)
    assert_close(flow.velocity(batch)[0], flow.velocity(Z), **TIGHT)


def test_a_model_with_integer_buffers_flows():
    network = TinyNetwork(3, 4)
    Z = normal(seeded(92), 5, 3)
    flow = xf.GradientFlow(xf.CrossEntropy("classes"), xf.Functional(network), torch.tensor([0, 1, 2, 3, 0]))
    assert_close(fall_along(flow, Z), flow.dissipation(Z), rtol=1e-7, atol=0)
    assert_close(xf.feature_gradient(flow.objective, flow.model, Z, flow.targets(Z)).total, -flow.velocity(Z), **TIGHT)


@pytest.mark.parametrize("kind", KINDS)
def test_energy_and_rate_are_of_what_is_given(kind):
    """ℓ at features, whatever the constraint; how fast it falls, of a velocity that is known."""
    flow, Z = random_flow(kind, "classes", 90, constraint=xf.Dual(1.5), heads=2, batch=(2,))
    free = xf.GradientFlow(flow.objective, flow.model, flow.targets(Z))
    X = flow.constraint.features(Z)
    assert torch.equal(flow.energy_at(X), free.energy(X))
    assert torch.equal(flow.energy_at(X), flow.energy(Z))
    assert (flow.energy_at(Z) != flow.energy(Z)).all()
    assert torch.equal(flow.rate(Z, flow.velocity(Z)), flow.dissipation(Z))
    assert_close(free.rate(Z, X), X.square().sum((-2, -1)))
