"""The scikit-learn faces: its own checks, the objective of LogisticRegression, and where labels enter."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import xentflow as xf
from xentflow.estimators import FeatureFlow, LabelLeakWarning, MultinomialFlowClassifier
from xentflow.training import fit_multinomial, multinomial


@pytest.mark.filterwarnings("ignore::xentflow.estimators.LabelLeakWarning")  # NearestNeighbours, by fit_transform
@parametrize_with_checks(
    [MultinomialFlowClassifier(), FeatureFlow(), FeatureFlow(oracle=xf.NearestNeighbours(1), passes=1)]
)
def test_scikit_learns_own_checks_pass(estimator, check):
    check(estimator)


@pytest.fixture
def samples(generator):
    """Overlapping classes in correlated, badly scaled features far from zero."""

    def make(classes, n=300, width=6):
        labels = torch.arange(n) % classes
        centres = torch.randn(classes, width, generator=generator, dtype=torch.float64)
        X = centres[labels] + torch.randn(n, width, generator=generator, dtype=torch.float64)
        return (X * torch.logspace(-1, 1, width, dtype=torch.float64) + 3).numpy(), labels.numpy()

    return make


def _objective(theta, bias, X, y, penalty):
    N = X @ theta.T + bias
    top = N.max(1, keepdims=True)
    losses = top[:, 0] + np.log(np.exp(N - top).sum(1)) - N[np.arange(len(y)), y]
    return losses.sum() + penalty * (theta**2).sum() / 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(("classes", "C"), [(2, 1.0), (2, np.inf), (4, 0.05), (4, np.inf)])
def test_the_objective_of_logistic_regression_is_reached(samples, classes, C, intercept, dtype):
    X, y = samples(classes)
    control = LogisticRegression(C=C, fit_intercept=intercept, tol=1e-10, max_iter=20_000).fit(X, y)
    ours = MultinomialFlowClassifier(C=C, fit_intercept=intercept).fit(X.astype(dtype), y)
    theta, bias, penalty = control.coef_, control.intercept_, 1 / C
    if classes == 2:
        theta, bias, penalty = np.stack([-theta[0], theta[0]]) / 2, np.array([-bias[0], bias[0]]) / 2, 2 / C
    least = _objective(theta, bias, X, y, penalty)
    found = _objective(ours.theta_.astype(float), ours.bias_.astype(float), X, y, penalty)
    assert abs(found / least - 1) < 1e-6
    assert ours.objective_ * len(X) == pytest.approx(least, rel=1e-6)
    np.testing.assert_allclose(ours.predict_proba(X), control.predict_proba(X), atol=5e-3)
    assert (ours.bias_ == 0).all() == (not intercept)


def test_a_tight_tolerance_is_met_in_float64_by_dense_blocks_and_by_diagonals(samples, monkeypatch):
    X, y = samples(3)
    control = LogisticRegression(solver="newton-cholesky", tol=1e-12).fit(X, y)
    least = _objective(control.coef_, control.intercept_, X, y, 1.0) / len(X)
    for entries in (multinomial._DENSE, 0):
        monkeypatch.setattr(multinomial, "_DENSE", entries)
        fitted = fit_multinomial(torch.from_numpy(X), torch.from_numpy(y), 3, tolerance=1e-13, iterations=2000)
        assert fitted.converged
        assert fitted.objective == pytest.approx(least, rel=1e-10)
        assert fitted.theta.sum(0).abs().max() < 1e-12


def test_the_gradient_of_the_objective_is_that_of_autograd(samples):
    X, y = samples(3)
    Z, labels = torch.from_numpy(X), torch.from_numpy(y)
    W = torch.linspace(-0.3, 0.4, 21, dtype=torch.float64).view(3, 7).requires_grad_()
    plain = torch.nn.functional.cross_entropy(Z @ W[:, :-1].T + W[:, -1], labels) + 0.35 * W[:, :-1].square().sum()
    (expected,) = torch.autograd.grad(plain, W)
    value, gradient = multinomial._Problem(Z, labels, 3, 0.7, bias=True).value_and_gradient(W.detach())
    assert value == pytest.approx(plain.item(), rel=1e-14)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_fitting_says_when_it_has_not_arrived(samples):
    X, y = samples(3)
    with pytest.warns(ConvergenceWarning, match="expected to reach tol=3e-08 in 2 steps"):
        MultinomialFlowClassifier(max_iter=2).fit(X, y)


def test_prediction_sees_no_labels_and_the_model_is_the_classifier(samples):
    X, y = samples(3)
    names = np.array(["a", "b", "c"])
    fitted = pickle.loads(pickle.dumps(MultinomialFlowClassifier().fit(X, names[y])))
    N = fitted.model_.logits(torch.from_numpy(X))
    np.testing.assert_array_equal(fitted.decision_function(X), N.numpy())
    np.testing.assert_allclose(fitted.predict_proba(X), N.softmax(1).numpy())
    np.testing.assert_allclose(fitted.predict_log_proba(X), N.log_softmax(1).numpy())
    assert (fitted.predict(X) == names[N.argmax(1).numpy()]).all()


def test_feature_flow_is_the_derived_block(samples):
    X, y = samples(3)
    flow = FeatureFlow(oracle=xf.SelfPrediction(0.25), passes=3).fit(X, y)
    theta, bias, Z = flow.classifier_.theta_, flow.classifier_.bias_, X
    step = 2 / np.linalg.norm(theta, 2) ** 2
    for _ in range(3):
        N = Z @ theta.T + bias
        p, C = (np.exp(t * (N - N.max(1, keepdims=True))) for t in (1, 4))
        Z = Z - step * (p / p.sum(1, keepdims=True) - C / C.sum(1, keepdims=True)) @ theta
    np.testing.assert_allclose(flow.transform(X), Z, rtol=1e-9)
    assert np.abs(Z - X).max() > 1e-2
    assert not flow.uses_labels
    default = FeatureFlow(passes=3).fit(X, y).transform(X)
    np.testing.assert_array_equal(default, flow.set_params(oracle=xf.SelfPrediction(0.5)).fit(X, y).transform(X))


def test_given_takes_labels_only_when_told_and_warns_that_it_leaks(samples):
    X, y = samples(3)
    names = np.array(["a", "b", "c"])[y]
    with pytest.raises(xf.XentflowError, match="leak_labels: expected True with the oracle Given"):
        FeatureFlow(oracle=xf.Given()).fit(X, names)
    with pytest.raises(xf.XentflowError, match="leak_labels: expected False with an oracle that takes no labels"):
        FeatureFlow(leak_labels=True).fit(X, names)
    flow = FeatureFlow(oracle=xf.Given(), leak_labels=True, passes=50).fit(X, names)
    assert flow.uses_labels
    with pytest.raises(xf.XentflowError, match="y: expected the labels of the samples to move"):
        flow.transform(X)
    with pytest.raises(xf.XentflowError, match=r"y: expected labels seen in fit, \['a', 'b', 'c'\], got"):
        flow.transform(X, ["z"] * len(X))
    with pytest.raises(xf.XentflowError, match="y: expected one label for each of 300 samples, got 2"):
        flow.transform(X, names[:2])
    shuffled = np.roll(names, 1)
    with pytest.warns(LabelLeakWarning, match="labels of the transformed samples enter"):
        moved = flow.transform(X, shuffled)
    agreement = lambda Z: (flow.classifier_.predict(Z) == shuffled).mean()  # noqa: E731
    assert agreement(X) < 0.3
    assert agreement(moved) > 0.95
    with pytest.warns(LabelLeakWarning, match="labels of the transformed samples enter"):
        np.testing.assert_array_equal(clone(flow).fit_transform(X, names), flow.transform(X, names))
    with pytest.raises(xf.XentflowError, match="y: expected none, since the oracle SelfPrediction"):
        FeatureFlow().fit(X, names).transform(X, names)


def test_nearest_neighbours_remember_the_training_samples_and_say_so(samples):
    X, y = samples(3)
    flow, oracle = FeatureFlow(oracle=xf.NearestNeighbours(1), passes=1), xf.NearestNeighbours(1)
    with pytest.warns(LabelLeakWarning, match="training samples find themselves"):
        moved = flow.fit_transform(X, y)
    assert flow.oracle.memory is None
    told = FeatureFlow(oracle=xf.Given(), passes=1, leak_labels=True).fit(X, y)
    with pytest.warns(LabelLeakWarning):
        np.testing.assert_allclose(moved, told.transform(X, y), rtol=1e-12)
    assert repr(flow.oracle) == repr(oracle)


def test_pipelines_grid_search_clone_and_pandas():
    pandas = pytest.importorskip("pandas")
    X, y = load_iris(return_X_y=True, as_frame=True)
    pipeline = make_pipeline(FeatureFlow(MultinomialFlowClassifier()), MultinomialFlowClassifier())
    search = GridSearchCV(
        pipeline, {"featureflow__classifier__C": [0.1, 1.0], "featureflow__passes": [1, 3]}, cv=3, error_score="raise"
    ).fit(X, y)
    assert search.best_score_ > 0.9
    flow = clone(search.best_estimator_[0]).set_output(transform="pandas").fit(X, y)
    moved = flow.transform(X)
    assert isinstance(moved, pandas.DataFrame)
    assert list(moved.columns) == list(flow.get_feature_names_out()) == list(X.columns)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (MultinomialFlowClassifier(C=0), "C: expected a positive number, or infinity for no penalty, got 0"),
        (MultinomialFlowClassifier(tol=float("nan")), "tol: expected a positive finite number, got nan"),
        (MultinomialFlowClassifier(max_iter=0), "max_iter: expected a positive whole number, got 0"),
        (MultinomialFlowClassifier(fit_intercept="no"), "fit_intercept: expected True or False, got 'no'"),
        (FeatureFlow(passes=1.5), "passes: expected a positive whole number, got 1.5"),
        (FeatureFlow(oracle="given"), "oracle: expected None or an instance of Oracle, got 'given'"),
        (FeatureFlow(LogisticRegression()), "classifier: expected None or an instance of MultinomialFlowClassifier"),
        (FeatureFlow(oracle=xf.Band()), "oracle: expected one for Linear logits, got Band"),
    ],
)
def test_settings_are_refused_when_fitted(estimator, message, samples):
    with pytest.raises(xf.XentflowError, match=message):
        estimator.fit(*samples(3, n=30))


@pytest.mark.parametrize("estimator", [MultinomialFlowClassifier(), FeatureFlow()])
def test_bad_samples_are_refused_in_the_packages_error(estimator, samples):
    X, y = samples(3, n=30)
    bad = X.copy()
    bad[3, 2] = np.nan
    for samples_, labels, message in (
        (bad, y, "NaN"),
        (X, None, "requires y to be passed, but the target y is None"),
        (X, y[:-1], "inconsistent numbers of samples"),
        (X, np.zeros(30), "at least two classes, got one class: .*0"),
        (X[0], y, "Expected 2D array"),
        (X[:0], y[:0], "0 sample"),
        (X, y + 0.5, "Unknown label type"),
    ):
        with pytest.raises(xf.XentflowError, match=message):
            estimator.fit(samples_, labels)
    fitted = estimator.fit(X, y)
    apply = fitted.transform if isinstance(fitted, FeatureFlow) else fitted.predict
    with pytest.raises(xf.XentflowError, match="expecting 6 features"):
        apply(X[:, :2])


def test_importing_the_package_imports_no_scikit_learn():
    source = "import sys, xentflow; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
