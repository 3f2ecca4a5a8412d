"""Entries that take features, targets and masks: feature_gradient, printed_form, Objective, GradientFlow, integrate."""

import pytest
import torch
from refusal import INF, NAN, bad_features, bad_masks, bad_targets, each, ramp, refuses, spoiled

import xentflow as xf

AXES = ("sequence", "classes")
THETA = ramp(4, 3)
SQUARE = ramp(3, 3)
Z = ramp(2, 5, 3)
N = ramp(2, 5, 4)


def uniform(axis, *shape):
    return torch.softmax(torch.zeros(*shape, dtype=torch.float64), -2 if axis == "sequence" else -1)


def takers_of_features(axis="classes"):
    loss, linear, quadratic = xf.CrossEntropy(axis), xf.Linear(THETA), xf.Quadratic(SQUARE)
    C, square = uniform(axis, 5, 4), uniform(axis, 5, 5)
    return {
        "feature_gradient linear": lambda Z: xf.feature_gradient(loss, linear, Z, C),
        "feature_gradient quadratic": lambda Z: xf.feature_gradient(loss, quadratic, Z, square),
        "feature_gradient functional": lambda Z: xf.feature_gradient(loss, xf.Functional(linear.logits), Z, C),
        "printed_form": lambda Z: xf.printed_form(loss, quadratic, Z, square),
        "velocity": lambda Z: xf.GradientFlow(loss, linear, C).velocity(Z),
        "energy": lambda Z: xf.GradientFlow(loss, linear, C).energy(Z),
        "dissipation": lambda Z: xf.GradientFlow(loss, quadratic, square).dissipation(Z),
        "targets": lambda Z: xf.GradientFlow(loss, linear, C).targets(Z),
        "attention velocity": lambda Z: xf.GradientFlow(loss, linear, C).terms[0].velocity(Z),
        "target velocity": lambda Z: xf.GradientFlow(loss, linear, C).terms[1].velocity(Z),
        "line search": lambda Z: xf.LineSearch()(xf.GradientFlow(loss, linear, C), Z),
    }


@pytest.mark.parametrize("entry", takers_of_features())
@each(
    bad_features(),
    [
        ("width", ramp(2, 5, 7), ("Z: expected (*batch, S, 3) to match theta", "got (2, 5, 7)")),
        ("single precision", Z.float(), ("Z: expected the dtype of", "torch.float64", "got torch.float32")),
        ("half precision", Z.half(), ("Z: expected the dtype of", "torch.float64", "got torch.float16")),
        ("other device", Z.to("meta"), ("Z: expected the device of", "cpu", "got meta")),
    ],
)
def test_features(entry, bad, fragments):
    refuses(lambda: takers_of_features()[entry](bad), *fragments)


@pytest.mark.parametrize("kind", ["kind", "dtype", "device"])
def test_a_flow_that_has_seen_good_features_still_refuses_others(kind):
    flow = xf.GradientFlow(xf.CrossEntropy("classes"), xf.Linear(THETA), uniform("classes", 5, 4))
    flow.velocity(Z)
    bad = {"kind": Z.numpy(), "dtype": Z.float(), "device": Z.to("meta")}[kind]
    for quantity in (flow.velocity, flow.energy, flow.dissipation):
        refuses(lambda quantity=quantity: quantity(bad), "Z: expected")


@each(bad_features(name="Z0"))
def test_features_to_integrate_from(bad, fragments):
    flow = xf.GradientFlow(xf.CrossEntropy("classes"), xf.Linear(THETA), uniform("classes", 5, 4))
    refuses(lambda: xf.integrate(flow, bad, method=xf.Euler(), step=0.1, steps=1), *fragments)


@pytest.mark.parametrize("bad", [ramp(2, 5, 7), Z.float(), Z.to("meta")], ids=["width", "dtype", "device"])
def test_features_that_do_not_fit_the_flow(bad):
    flow = xf.GradientFlow(xf.CrossEntropy("classes"), xf.Linear(THETA), uniform("classes", 5, 4))
    refuses(lambda: xf.integrate(flow, bad, method=xf.Euler(), step=0.1, steps=1), "Z: expected")


def takers_of_targets(axis):
    loss, linear = xf.CrossEntropy(axis), xf.Linear(THETA)
    return {
        "feature_gradient": lambda C: xf.feature_gradient(loss, linear, Z, C),
        "velocity": lambda C: xf.GradientFlow(loss, linear, C).velocity(Z),
        "energy": lambda C: xf.GradientFlow(loss, linear, C).energy(Z),
        "integrate": lambda C: xf.integrate(xf.GradientFlow(loss, linear, C), Z, method=xf.Euler(), step=0.1, steps=1),
        "value": lambda C: loss.value(N, C),
        "per_distribution": lambda C: loss.per_distribution(N, C),
        "residual": lambda C: loss.residual(N, C),
        "gap": lambda C: loss.gap(N, C),
    }


def each_axis_with_its_targets():
    rows = [(axis, *row) for axis in AXES for row in bad_targets(axis)]
    ids = [f"{row[0]} {row[1]}" for row in rows]
    return pytest.mark.parametrize(("axis", "name", "bad", "fragments"), rows, ids=ids)


@pytest.mark.parametrize("entry", takers_of_targets("classes"))
@each_axis_with_its_targets()
def test_targets(entry, axis, name, bad, fragments):
    refuses(lambda: takers_of_targets(axis)[entry](bad), *fragments)


@pytest.mark.parametrize("axis", AXES)
def test_targets_of_the_printed_form(axis):
    C = uniform(axis, 5, 5)

    def printed(bad):
        return lambda: xf.printed_form(xf.CrossEntropy(axis), xf.Quadratic(SQUARE), Z, bad)

    refuses(printed(C.tolist()), "C: expected a torch.Tensor of targets or labels", "got list")
    refuses(printed(uniform(axis, 5, 4)), "C: expected the shape of the logits, (2, 5, 5)", "got (5, 4)")
    refuses(printed(C.float()), "C: expected the dtype of the features, torch.float64", "got torch.float32")
    refuses(printed(C.to("meta")), "C: expected the device of the features, cpu", "got meta")
    refuses(printed(spoiled(C, NAN)), "C: expected finite values", "1 NaN")
    refuses(printed(2 * C), "to sum to one", "got sums from 2 to 2")
    refuses(printed(torch.full((5,), 9)), "C: expected")


@pytest.mark.parametrize("axis", AXES)
def test_targets_outside_the_domain_of_other_potentials(axis):
    sigmoid, sparse = xf.Objective(xf.Softplus(axis)), xf.Objective(xf.Entmax(axis))
    C = uniform(axis, 2, 5, 4)
    refuses(lambda: sigmoid.value(N, spoiled(C, 1.5)), "C: expected weights between 0 and 1", "to 1.5")
    refuses(lambda: sigmoid.value(N, spoiled(C, -0.5)), "C: expected weights between 0 and 1", "got -0.5 to")
    refuses(lambda: sparse.value(N, 0.5 * C), "to sum to one", "got sums from 0.5 to 0.5")
    refuses(lambda: sparse.value(N, spoiled(C, -0.5)), "C: expected no negative weight")


def takers_of_masks():
    loss, linear, C = xf.CrossEntropy("classes"), xf.Linear(THETA), uniform("classes", 2, 5, 4)
    return {
        "feature_gradient": lambda mask: xf.feature_gradient(loss, linear, Z, C, mask),
        "velocity": lambda mask: xf.GradientFlow(loss, linear, C, mask=mask).velocity(Z),
        "energy": lambda mask: xf.GradientFlow(loss, linear, C, mask=mask).energy(Z),
        "attention velocity": lambda mask: xf.GradientFlow(loss, linear, C, mask=mask).terms[0].velocity(Z),
        "value": lambda mask: loss.value(N, C, mask),
        "residual": lambda mask: loss.residual(N, C, mask),
        "gap": lambda mask: loss.gap(N, C, mask),
    }


@pytest.mark.parametrize("entry", takers_of_masks())
@each(bad_masks())
def test_masks(entry, bad, fragments):
    refuses(lambda: takers_of_masks()[entry](bad), *fragments)


@pytest.mark.parametrize("axis", AXES)
def test_targets_on_masked_entries_do_not_count_towards_their_sum(axis):
    mask = torch.ones(5, 4, dtype=torch.bool)
    mask[0, 0] = False
    refuses(lambda: xf.CrossEntropy(axis).value(N, uniform(axis, 2, 5, 4), mask), "to sum to one", "got sums from 0.")


@pytest.mark.parametrize("entry", ["value", "per_distribution", "residual", "gap"])
@each(
    [
        ("list", N.tolist(), ("N: expected a torch.Tensor (*batch, S, K)", "got list")),
        ("integers", N.long(), ("N: expected a floating dtype", "torch.int64")),
        ("vector", N[0, 0], ("N: expected shape (*batch, S, K)", "got (4,)")),
        ("empty", N[:, :, :0], ("N: expected", "no empty dimension", "got (2, 5, 0)")),
        ("nan", spoiled(N, NAN), ("N: expected finite values", "1 NaN and 0 infinite")),
        ("inf", spoiled(N, INF), ("N: expected finite values", "0 NaN and 1 infinite")),
        ("single precision", N.float(), ("C: expected the dtype of the features, torch.float32", "got torch.float64")),
        ("other device", N.to("meta"), ("C: expected the device of the features, meta", "got cpu")),
        ("other shape", ramp(2, 4, 4), ("C: expected the shape of the logits, (2, 4, 4)", "got (2, 5, 4)")),
    ]
)
def test_logits(entry, bad, fragments):
    refuses(lambda: getattr(xf.CrossEntropy("classes"), entry)(bad, uniform("classes", 2, 5, 4)), *fragments)


def test_parts_of_the_wrong_kind():
    loss, linear, C = xf.CrossEntropy("classes"), xf.Linear(THETA), uniform("classes", 5, 4)
    own = xf.Quadratic(SQUARE, roles="own")
    square = uniform("classes", 5, 5)
    refuses(lambda: xf.Objective("softmax"), "potential: expected a Potential such as LogSumExp", "got str")
    refuses(lambda: xf.Objective(xf.LogSumExp), "potential: expected a Potential", "got")
    refuses(
        lambda: xf.feature_gradient(loss.potential, linear, Z, C), "objective: expected", "Objective, got LogSumExp"
    )
    refuses(lambda: xf.feature_gradient(loss, THETA, Z, C), "model: expected an instance of Model, got Tensor")
    refuses(lambda: xf.GradientFlow(linear, loss, C), "objective: expected an instance of Objective, got Linear")
    refuses(lambda: xf.GradientFlow(loss, xf.Linear, C), "model: expected an instance of Model, got the class Linear")
    refuses(
        lambda: xf.GradientFlow(loss, linear, C, constraint="sphere"), "constraint: expected", "Constraint, got str"
    )
    refuses(lambda: xf.GradientFlow(loss, linear, C, constraint=xf.Sphere), "got the class Sphere itself")
    refuses(lambda: xf.GradientFlow(loss, own, square, printed_form=True), 'Quadratic model with roles="both"')
    refuses(lambda: xf.printed_form(loss, linear, Z, C), 'printed_form: expected a Quadratic model with roles="both"')
    refuses(lambda: xf.printed_form(loss, own, Z, square), 'printed_form: expected a Quadratic model with roles="both"')
    refuses(lambda: xf.printed_form(None, xf.Quadratic(SQUARE), Z, square), "objective: expected", "got NoneType")
    refuses(lambda: xf.safe_step(linear, loss), "objective: expected an instance of Objective, got Linear")
    refuses(lambda: xf.safe_step(loss, THETA), "model: expected an instance of Model, got Tensor")
    refuses(lambda: xf.curvature_bound(loss, xf.Quadratic(SQUARE)), "expected a model affine in Z, got Quadratic")
    refuses(lambda: xf.LineSearch()(linear, Z), "flow: expected an instance of GradientFlow, got Linear")
    refuses(lambda: own.pullback(Z, ramp(2, 5, 5)), 'pullback with roles="own": expected the axis')
