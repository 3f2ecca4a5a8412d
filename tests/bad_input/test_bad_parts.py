"""Constructors and what stands alone: potentials, models, attention, constraints, the line search."""

import pytest
import torch
from refusal import INF, NAN, bad_features, each, ramp, refuses, spoiled

import xentflow as xf

Z = ramp(2, 5, 3)
NOT_POSITIVE = [0, -1.0, NAN, INF, "1", None, True]


@pytest.mark.parametrize("bad", ["rows", "Classes", -1, None, ["classes"], ("classes",)], ids=repr)
@pytest.mark.parametrize(
    "entry",
    [
        xf.LogSumExp,
        xf.Softplus,
        xf.HalfSquare,
        xf.Entmax,
        xf.CrossEntropy,
        lambda axis: xf.cross_attention(Z, ramp(4, 3), axis=axis),
        lambda axis: xf.self_attention(Z, axis=axis),
        lambda axis: xf.Quadratic(ramp(3, 3), roles="own").pullback(Z, ramp(2, 5, 5), axis or "none"),
    ],
    ids=["LogSumExp", "Softplus", "HalfSquare", "Entmax", "CrossEntropy", "cross", "self", "pullback"],
)
def test_axis(entry, bad):
    refuses(lambda: entry(bad), 'axis: expected "sequence" or "classes", got')


@pytest.mark.parametrize("bad", NOT_POSITIVE, ids=repr)
def test_numbers_that_must_be_positive(bad):
    said = f"got {bad!r}"
    refuses(lambda: xf.LogSumExp("classes", temperature=bad), "temperature: expected a positive finite number", said)
    refuses(lambda: xf.CrossEntropy("classes", temperature=bad), "temperature: expected a positive finite number", said)
    refuses(lambda: xf.Entmax("classes", alpha=bad), "alpha: expected 1 < alpha <= 2", said)
    refuses(lambda: xf.LineSearch(initial=bad), "LineSearch: expected initial > 0", said)
    refuses(lambda: xf.Dual(radius=bad), "radius: expected a positive finite number", said)
    if bad is not None:
        refuses(lambda: xf.Sphere(radius=bad), "radius: expected a positive finite number or None", said)


@pytest.mark.parametrize("bad", [0, 1, 1.5, -0.1, NAN, "0.5", None], ids=repr)
def test_fractions_of_a_line_search(bad):
    refuses(lambda: xf.LineSearch(shrink=bad), "0 < shrink < 1", repr(bad))
    refuses(lambda: xf.LineSearch(slope=bad), "0 < slope < 1", repr(bad))


@pytest.mark.parametrize("bad", [0, -3, 2.5, True, None], ids=repr)
def test_trials_of_a_line_search(bad):
    refuses(lambda: xf.LineSearch(trials=bad), "a whole number of trials > 0", repr(bad))


@pytest.mark.parametrize("bad", [1.0, 2.1], ids=repr)
def test_alpha_has_two_ends(bad):
    refuses(lambda: xf.Entmax("classes", alpha=bad), "alpha: expected 1 < alpha <= 2 (1 is LogSumExp)", f"got {bad}")


def bad_weights(name, shape):
    W = ramp(*shape)
    return [
        (f"{name} list", W.tolist(), (f"{name}: expected a torch.Tensor", "got list")),
        (f"{name} integers", W.long(), (f"{name}: expected a floating dtype", "torch.int64")),
        (f"{name} vector", W[0], (f"{name}: expected shape", f"got ({shape[-1]},)")),
        (f"{name} empty", W[:0], (f"{name}: expected shape", "no empty dimension", f"got (0, {shape[-1]})")),
        (f"{name} nan", spoiled(W, NAN), (f"{name}: expected finite values", "1 NaN and 0 infinite")),
        (f"{name} inf", spoiled(W, -INF), (f"{name}: expected finite values", "0 NaN and 1 infinite")),
        (f"{name} four dimensions", W[None, None], (f"{name}: expected", f"got {(1, 1, *shape)}")),
    ]


@each(bad_weights("theta", (4, 3)))
def test_theta_of_a_linear_model(bad, fragments):
    refuses(lambda: xf.Linear(bad), *fragments)


@each(bad_weights("theta", (3, 3)), [("not square", ramp(4, 3), ("theta: expected a square (F, F)", "got (4, 3)"))])
def test_theta_of_a_quadratic_model(bad, fragments):
    refuses(lambda: xf.Quadratic(bad), *fragments)


@each(bad_weights("phi", (3, 2)))
def test_phi_of_a_quadratic_model(bad, fragments):
    refuses(lambda: xf.Quadratic.from_factor(bad), *fragments)


def test_a_second_factor_unlike_the_first():
    def factors(psi):
        return lambda: xf.Quadratic.from_factor(ramp(3, 2), psi=psi)

    refuses(factors(ramp(3, 4)), "psi: expected the shape of phi, (3, 2), got (3, 4)")
    refuses(factors(ramp(3, 2).float()), "psi: expected the dtype of phi, torch.float64", "got torch.float32")
    refuses(factors([[1.0]]), "psi: expected a torch.Tensor", "got list")


@pytest.mark.parametrize("bad", ["query", None, "Both", ["both"]], ids=repr)
def test_roles(bad):
    refuses(lambda: xf.Quadratic(ramp(3, 3), roles=bad), 'roles: expected "both" or "own", got', repr(bad))
    refuses(lambda: xf.Quadratic.from_factor(ramp(3, 2), roles=bad), 'roles: expected "both" or "own", got')


@each(bad_weights("theta", (3, 2)))
def test_theta_of_a_bilinear_model(bad, fragments):
    refuses(lambda: xf.Bilinear(bad, ramp(4, 2)), *fragments)


@each(
    [row for row in bad_weights("context", (4, 2)) if "four" not in row[0]],
    [
        ("width", ramp(4, 3), ("context: expected (*batch, K, 2) to match theta", "got (4, 3)")),
        ("dtype", ramp(4, 2).float(), ("context: expected the dtype of theta, torch.float64", "got torch.float32")),
        ("device", ramp(4, 2).to("meta"), ("context: expected the device of theta, cpu", "got meta")),
    ],
)
def test_context_of_a_bilinear_model(bad, fragments):
    refuses(lambda: xf.Bilinear(ramp(3, 2), bad), *fragments)


def test_a_context_of_another_batch():
    model = xf.Bilinear(ramp(3, 2), ramp(7, 4, 2))
    refuses(lambda: model.logits(Z), "Z: expected the batch of the context, (7,), got (2,)")


@each(
    [
        ("list", [0.0], ("bias: expected a torch.Tensor", "got list")),
        ("integers", torch.zeros(4, dtype=torch.long), ("bias: expected a floating dtype", "torch.int64")),
        ("length", ramp(3), ("bias: expected (4,) to match theta, got (3,)",)),
        ("scalar", ramp(1)[0], ("bias: expected shape (K,) or (H, K)", "got ()")),
        ("nan", spoiled(ramp(4), NAN), ("bias: expected finite values", "1 NaN")),
        ("dtype", ramp(4).float(), ("bias: expected the dtype of theta, torch.float64", "got torch.float32")),
        ("device", ramp(4).to("meta"), ("bias: expected the device of theta, cpu", "got meta")),
    ]
)
def test_bias(bad, fragments):
    refuses(lambda: xf.Linear(ramp(4, 3), bad), *fragments)


def test_functions_that_are_none():
    refuses(lambda: xf.Functional(ramp(3, 3)), "fn: expected a callable from features to logits", "got Tensor")
    for heads in (0, -1, 1.0, True, "2"):
        refuses(lambda heads=heads: xf.Functional(torch.tanh, heads), "heads: expected None or a positive whole number")


@each(
    [
        ("no tensor", lambda Z: Z.tolist(), ("fn: expected logits (*batch, S, K) for Z (2, 5, 3), got list",)),
        ("too few dimensions", lambda Z: Z.sum(0), ("fn: expected logits (*batch, S, K)", "got (5, 3)")),
        ("mixed samples", lambda Z: Z[:1], ("fn: expected logits (*batch, S, K)", "got (1, 5, 3)")),
    ]
)
def test_what_a_function_returns(bad, fragments):
    refuses(lambda: xf.Functional(bad).logits(Z), *fragments)


def test_a_function_with_other_heads():
    model = xf.Functional(lambda Z: Z.unsqueeze(-3), heads=4)
    refuses(lambda: model.logits(Z), "fn: expected logits (*batch, 4, S, K) for Z (2, 5, 3), got (2, 1, 5, 3)")


MODELS = {
    "Linear": xf.Linear(ramp(4, 3)),
    "Quadratic": xf.Quadratic(ramp(3, 3)),
    "factored": xf.Quadratic.from_factor(ramp(3, 2)),
    "Bilinear": xf.Bilinear(ramp(3, 2), ramp(4, 2)),
    "Functional": xf.Functional(lambda Z: Z @ ramp(3, 4)),
}
STRUCTURAL = [row for row in bad_features() if "inf" not in row[0] and row[0] != "nan"]


@pytest.mark.parametrize("name", MODELS)
@each(STRUCTURAL)
def test_features_of_a_model(name, bad, fragments):
    refuses(lambda: MODELS[name].logits(bad), *fragments)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Functional"])
def test_features_that_do_not_fit_a_model(name):
    logits = MODELS[name].logits
    refuses(lambda: logits(ramp(2, 5, 7)), "Z: expected (*batch, S, 3) to match theta", "got (2, 5, 7)")
    refuses(lambda: logits(Z.float()), "Z: expected the dtype of theta, torch.float64", "got torch.float32")
    refuses(lambda: logits(Z.to("meta")), "Z: expected the device of theta, cpu", "got meta")


def test_models_without_an_operator_norm():
    refuses(MODELS["Quadratic"].operator_norm, "Quadratic is not affine in Z")


@each(bad_features())
def test_features_of_cross_attention(bad, fragments):
    refuses(lambda: xf.cross_attention(bad, ramp(4, 3), axis="classes"), *fragments)


@each(bad_features(name="X"))
def test_features_of_self_attention(bad, fragments):
    refuses(lambda: xf.self_attention(bad, axis="classes"), *fragments)


@each(
    [row for row in bad_weights("theta", (4, 3)) if "four" not in row[0]],
    [
        ("width", ramp(4, 7), ("theta: expected (*batch, K, 3) to match Z", "got (4, 7)")),
        (
            "other batch",
            ramp(3, 4, 3),
            ("theta: expected (K, F), or one for each sample of Z", "got (3, 4, 3)"),
        ),
        ("dtype", ramp(4, 3).float(), ("theta: expected the dtype of Z, torch.float64", "got torch.float32")),
        ("device", ramp(4, 3).to("meta"), ("theta: expected the device of Z, cpu", "got meta")),
    ],
)
def test_theta_of_cross_attention(bad, fragments):
    refuses(lambda: xf.cross_attention(Z, bad, axis="classes"), *fragments)


CONSTRAINTS = [xf.Free(), xf.Sphere(), xf.Sphere(radius=2.0), xf.Dual(radius=2.0), xf.Whitened()]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=repr)
@each(bad_features())
def test_features_to_place(constraint, bad, fragments):
    refuses(lambda: constraint.place(bad), *fragments)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=repr)
@pytest.mark.parametrize("entry", ["tangent", "retract"])
@each(STRUCTURAL)
def test_features_to_move(constraint, entry, bad, fragments):
    refuses(lambda: getattr(constraint, entry)(bad, Z), *fragments)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=repr)
@pytest.mark.parametrize("entry", ["tangent", "retract"])
@each(
    [
        ("list", Z.tolist(), ("V: expected a torch.Tensor like Z", "got list")),
        ("integers", Z.long(), ("V: expected a floating dtype", "torch.int64")),
        ("shape", Z.mT, ("V: expected the shape of Z, (2, 5, 3)", "got (2, 3, 5)")),
        ("one for all", Z[:1], ("V: expected the shape of Z, (2, 5, 3)", "got (1, 5, 3)")),
        ("dtype", Z.float(), ("V: expected the dtype of Z, torch.float64", "got torch.float32")),
        ("device", Z.to("meta"), ("V: expected the device of Z, cpu", "got meta")),
    ]
)
def test_velocities(constraint, entry, bad, fragments):
    refuses(lambda: getattr(constraint, entry)(Z, bad), *fragments)


@pytest.mark.parametrize("bad", [Z[:1], Z.float(), Z.tolist()], ids=["shape", "dtype", "list"])
def test_what_the_metric_of_a_dual_state_is_asked_for(bad):
    refuses(lambda: xf.Dual(2.0).metric(Z, bad), "V: expected")


def test_too_few_tokens_to_whiten():
    refuses(
        lambda: xf.Whitened().place(ramp(2, 3)), "at least as many tokens as features", "got 2 tokens of 3 features"
    )
