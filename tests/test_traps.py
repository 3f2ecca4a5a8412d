"""Uses that a reader would trust and that are easy to get wrong: edited targets, swapped parameters, modules that write
in place, padding under positional oracles, certificates beyond their hypotheses."""

import pytest
import torch
from torch import nn

import xentflow as xf
from xentflow.certificate import certify
from xentflow.configuration import block_config, block_from_config


@pytest.fixture
def normal(generator):
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_a_flow_follows_targets_that_are_edited(normal):
    labels = torch.tensor([0, 1, 2, 0])
    flow = xf.GradientFlow(xf.CrossEntropy("classes"), xf.Linear(normal(3, 2)), labels)
    Z = normal(4, 2)
    before = flow.energy(Z)
    labels[0] = 2
    fresh = xf.GradientFlow(flow.objective, flow.model, labels)
    assert flow.energy(Z) != before
    torch.testing.assert_close(flow.energy(Z), fresh.energy(Z), rtol=0, atol=0)


def test_a_flow_first_used_without_gradients_still_gives_them(normal):
    logits = normal(4, 3).requires_grad_()
    mask = torch.ones(4, 3, dtype=torch.bool)
    C = torch.softmax(logits, -1)
    flow = xf.GradientFlow(xf.CrossEntropy("classes"), xf.Linear(normal(3, 2)), C, mask=mask)
    Z = normal(4, 2)
    with torch.no_grad():
        flow.energy(Z)
    (gradient,) = torch.autograd.grad(flow.energy(Z), logits)
    assert gradient.norm() > 0


def test_labels_can_be_vmapped(normal):
    block = xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal(3, 2)))
    Z, labels = normal(5, 4, 2), torch.arange(20).reshape(5, 4) % 3
    mapped = torch.vmap(lambda Z, labels: block(Z, targets=labels))(Z, labels)
    torch.testing.assert_close(mapped, block(Z, targets=labels), rtol=1e-14, atol=1e-14)


def test_a_boolean_matrix_is_a_matrix_even_where_it_could_be_labels(normal):
    Z, theta = normal(4, 4, 3), normal(3, 3)
    eye = torch.eye(4, dtype=torch.bool)
    loss, model = xf.CrossEntropy("classes"), xf.Quadratic(theta)
    N = model.logits(Z)
    torch.testing.assert_close(loss.value(N, eye), loss.value(N, eye.double()))


def test_a_mask_that_could_mean_samples_or_heads_is_refused(normal):
    model = xf.Quadratic(normal(4, 3, 3))
    mask = torch.ones(4, 5, 5, dtype=torch.bool)
    C = torch.full((5, 5), 0.2, dtype=torch.float64)
    with pytest.raises(xf.XentflowError, match="mask: expected a shape"):
        xf.feature_gradient(xf.CrossEntropy("classes"), model, normal(4, 5, 3), C, mask)


@pytest.mark.parametrize("axis", ["sequence", "classes"])
@pytest.mark.parametrize("oracle", [xf.Shift(1), xf.Shift(-1), xf.Band(1), xf.Uniform()], ids=repr)
def test_padding_changes_no_real_token_under_any_positional_oracle(normal, axis, oracle):
    block = xf.derive(xf.CrossEntropy(axis), xf.Quadratic(normal(2, 3, 3)), oracle=oracle, step=0.1)
    Z, rest = normal(2, 4, 3), normal(2, 2, 3)
    padding = torch.tensor([True] * 4 + [False] * 2).expand(2, 6)
    padded = block(torch.cat([Z, rest], dim=-2), padding=padding)
    torch.testing.assert_close(padded[:, :4], block(Z), rtol=1e-12, atol=1e-12)


def test_neighbours_without_a_class_give_distributions_on_the_sequence_axis(normal):
    memory, targets = normal(6, 2), torch.eye(3, dtype=torch.float64)[[0, 1, 0, 1, 0, 1]]
    oracle = xf.NearestNeighbours(2).remember(memory, targets)
    block = xf.derive(xf.CrossEntropy("sequence"), xf.Linear(normal(3, 2)), oracle=oracle)
    assert block(normal(4, 2)).isfinite().all()


def test_a_trajectory_sees_parameters_that_were_swapped(normal):
    block = xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal(3, 2)), oracle=xf.Uniform())
    trajectory = block.trajectory(normal(4, 2))
    block.model.theta.data = 5 * block.model.theta.data
    with pytest.raises(xf.XentflowError, match="expected the parameters of the trace"):
        _ = trajectory.energy


def test_the_meter_leaves_its_input_alone_and_reads_modules_that_write_in_place(normal):
    flow = xf.GradientFlow(xf.CrossEntropy("classes"), xf.Linear(normal(3, 2)), torch.tensor([0, 1, 2, 0]))
    Z = normal(4, 2)
    kept = Z.clone()
    in_place = xf.measure_faithfulness(nn.ReLU(inplace=True), flow, Z)
    assert torch.equal(Z, kept)
    assert in_place.cosine == xf.measure_faithfulness(nn.ReLU(), flow, Z).cosine != 0
    assert xf.measure_faithfulness(nn.Identity(), flow, Z).relative_error == 1.0


def test_the_meter_reads_layers_called_by_keyword_and_says_which_it_cannot_read(normal):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2).double()
            self.outer = nn.Linear(2, 3).double()

        def forward(self, Z):
            self.outer(Z)
            return self.inner(input=Z)

    flow = xf.GradientFlow(xf.CrossEntropy("classes"), xf.Linear(normal(3, 2)), torch.tensor([0, 1, 2, 0]))
    (layer,) = xf.measure_faithfulness(Wrapper(), flow, normal(4, 2), layers=["inner"]).layers
    assert layer.name == "inner"
    with pytest.raises(xf.XentflowError, match=r"own shape, got \['outer'\]"):
        xf.measure_faithfulness(Wrapper(), flow, normal(4, 2), layers=["outer"])


def test_head_weights_must_be_one_for_each_head(normal):
    labels = torch.tensor([0, 1, 2, 0])
    loss = xf.CrossEntropy("classes")
    ones = torch.ones(2, 1, 1, dtype=torch.float64)
    with pytest.raises(xf.XentflowError, match="none, for a model without heads"):
        xf.GradientFlow(loss, xf.Linear(normal(3, 2)), labels, head_weights=ones)
    with pytest.raises(xf.XentflowError, match=r"a tensor \(2, 1, 1\), got \(2,\)"):
        xf.GradientFlow(loss, xf.Linear(normal(2, 3, 2)), labels, head_weights=ones.flatten())
    with pytest.raises(xf.XentflowError, match="none negative"):
        xf.GradientFlow(loss, xf.Linear(normal(2, 3, 2)), labels, head_weights=-ones)


def test_a_certified_step_is_for_free_gradient_flows_only(normal):
    model, labels = xf.Linear(normal(3, 2)), torch.tensor([0, 1, 2, 0])
    loss = xf.CrossEntropy("classes")
    for flow in (
        xf.GradientFlow(loss, model, labels, xf.Sphere()),
        xf.GradientFlow(loss, model, labels, xf.Dual(1.0)),
        xf.GradientFlow(loss, model, labels, target_model=xf.Linear(normal(3, 2))),
    ):
        with pytest.raises(xf.XentflowError, match="gradient flow of Free features"):
            xf.integrate(flow, normal(4, 2), xf.Euler(), xf.CertifiedStep(), 2)


def test_a_certified_block_that_is_still_zero_stands_still(normal):
    zero = xf.Linear(torch.zeros(3, 2, dtype=torch.float64))
    block = xf.derive(xf.CrossEntropy("classes"), zero, oracle=xf.Uniform(), step=xf.CertifiedStep())
    Z = normal(4, 2)
    assert torch.equal(block(Z), Z)


def test_a_token_at_the_origin_of_its_sphere_neither_moves_nor_dissipates(normal):
    Z = normal(4, 2)
    Z[0] = 0
    flow = xf.GradientFlow(xf.CrossEntropy("classes"), xf.Linear(normal(3, 2)), torch.tensor([0, 1, 2, 0]), xf.Sphere())
    assert torch.equal(flow.velocity(Z)[0], torch.zeros(2, dtype=torch.float64))


def test_an_oracle_reads_features_where_the_block_has_placed_them(normal):
    sphere = xf.Sphere(radius=2.0)
    block = xf.derive(
        xf.CrossEntropy("classes"), xf.Linear(normal(3, 2)), oracle=xf.SelfPrediction(0.5), constraint=sphere
    )
    Z = normal(4, 2)
    torch.testing.assert_close(block(Z), block(sphere.place(Z)), rtol=1e-13, atol=1e-13)


def test_the_certificate_says_that_l_cannot_rise_only_where_that_is_proved(normal):
    Z, labels = normal(2, 4, 2), torch.zeros(2, 4, dtype=torch.long)
    loss = xf.CrossEntropy("classes")

    def certified(**settings):
        return certify(xf.derive(loss, xf.Linear(normal(3, 2)), **settings), Z, {"targets": labels}).certified

    assert certified(step=xf.CertifiedStep())
    assert not certified(step=1e-3, constraint=xf.Sphere())
    assert not certified(step=1e-3, constraint=xf.Dual(1.0))
    assert not certified(step=1e-3, splitting=xf.Strang())
    assert not certified(step=1e3)


def test_the_certificate_notices_features_that_leave_their_sphere(normal, monkeypatch):
    block = xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal(3, 2)), constraint=xf.Sphere(), step=0.1)
    inputs = {"targets": torch.zeros(4, dtype=torch.long)}
    Z = normal(4, 2)
    assert certify(block, Z, inputs).constraint_error < 1e-14
    monkeypatch.setattr(xf.Sphere, "retract", lambda self, Z, V: Z + V)
    assert certify(block, Z, inputs).constraint_error > 1e-4


def test_a_configuration_keeps_the_dtype(normal):
    block = xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal(3, 2)), oracle=xf.Uniform())
    rebuilt = block_from_config(block_config(block))
    rebuilt.load_state_dict(block.state_dict())
    Z = normal(4, 2)
    assert torch.equal(rebuilt(Z), block(Z))


def test_two_half_steps_with_one_parameter_are_told_to_share_it(normal):
    theta = nn.Parameter(normal(3, 2))
    with pytest.raises(xf.XentflowError, match="leave it out to share"):
        xf.derive(xf.CrossEntropy("classes"), xf.Linear(theta), target_model=xf.Linear(theta))


def test_a_hook_on_a_block_is_not_a_hook_on_the_model_it_came_from(normal):
    model = xf.Linear(normal(3, 2))
    block = xf.derive(xf.CrossEntropy("classes"), model, oracle=xf.Uniform())
    calls = []
    block.model.register_forward_hook(lambda *_: calls.append(1))
    model(normal(4, 2))
    assert calls == []


def test_steps_of_the_heads_stand_inside_the_sum(normal):
    block = xf.derive(
        xf.CrossEntropy("classes"), xf.Linear(normal(2, 3, 2)), oracle=xf.Uniform(), step=xf.LearnedStep(heads=2)
    )
    assert "Σₕ wₕ pₕθₕ" in block.derivation()
    assert "h = 1, with weights wₕ" in block.derivation()


def test_an_overflowing_exact_subflow_is_reported_not_raised_from_within(normal):
    flow = xf.GradientFlow(
        xf.CrossEntropy("classes"), xf.Quadratic(1e200 * normal(2, 2)), torch.eye(3, dtype=torch.float64)
    )
    with pytest.raises(xf.XentflowError, match=r"stopped being finite|smaller step"):
        xf.integrate(flow, normal(3, 2), xf.Strang(exact=True), 1.0, 2)
