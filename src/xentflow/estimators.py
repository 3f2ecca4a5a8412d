"""scikit-learn faces: a classifier that fits θ, and a transformer that moves features by the derived block.

Every sample is one token: Z is the ``(n, F)`` feature matrix, N = Zθᵀ + b, and the softmax is along the classes, so
that each sample moves by itself.

Labels: both fit θ with the labels of the training samples. ``MultinomialFlowClassifier`` predicts without any;
``FeatureFlow`` transforms without any, unless its oracle is ``Given``, which must be asked for twice and warns.

This module imports scikit-learn; ``import xentflow`` does not import this module.
"""

import copy
import math
import warnings
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, OneToOneFeatureMixin, TransformerMixin, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch.nn.functional import one_hot

from xentflow.derive import derive
from xentflow.errors import XentflowError
from xentflow.models import Linear
from xentflow.objective import CrossEntropy
from xentflow.oracles import NearestNeighbours, Oracle, SelfPrediction
from xentflow.stack import Stack
from xentflow.steps import CertifiedStep
from xentflow.training.multinomial import fit_multinomial

Array = NDArray[Any]


class LabelLeakWarning(UserWarning):
    """Labels of the very samples that are transformed enter their features: scores on these are worth nothing."""


class MultinomialFlowClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """θ and b that minimise Σ(LSE(N) − N_y) + ‖θ‖²/(2C), N = Zθᵀ + b: the objective of ``LogisticRegression``.

    C: inverse strength of the penalty on θ, infinite for none; fit_intercept: whether b is fitted or stays 0; tol: the
    expected further fall of the objective, relative to it, at which fitting stops; max_iter: most steps.

    After ``fit``: ``theta_`` θ ``(K, F)``, ``bias_`` b ``(K,)``, ``classes_``, ``objective_`` (the mean over samples),
    ``n_iter_``. All rows are kept for two classes too, where N₁ − N₀ is what ``LogisticRegression`` calls the decision.
    """

    def __init__(self, *, C: float = 1.0, fit_intercept: bool = True, tol: float = 3e-8, max_iter: int = 500) -> None:
        self.C = C
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: ArrayLike, y: ArrayLike) -> "MultinomialFlowClassifier":
        """Fit θ to samples X ``(n, F)`` and their labels y ``(n,)`` of any kind."""
        self._require_settings()
        samples, given = _validated(self, X, y, dtype=[np.float64, np.float32])
        _require(check_classification_targets, given)
        self.classes_, labels = np.unique(given, return_inverse=True)
        if len(self.classes_) < 2:
            raise XentflowError(f"y: expected labels of at least two classes, got one class: {self.classes_[0]!r}")
        fitted = fit_multinomial(
            _tensor(samples),
            torch.from_numpy(labels),
            len(self.classes_),
            C=float(self.C),
            bias=self.fit_intercept,
            tolerance=float(self.tol),
            iterations=int(self.max_iter),
        )
        if not fitted.converged:
            warnings.warn(
                f"{type(self).__name__}: expected to reach tol={self.tol:g} in {self.max_iter} steps, did not; allow "
                "more by max_iter, or regularise by a smaller C: without, separable classes have no minimum",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.theta_: Array = fitted.theta.numpy().astype(samples.dtype)
        self.bias_: Array = fitted.bias.numpy().astype(samples.dtype)
        self.objective_, self.n_iter_ = fitted.objective, fitted.iterations
        return self

    def decision_function(self, X: ArrayLike) -> Array:
        """N ``(n, K)``; for two classes N₁ − N₀ ``(n,)``."""
        N = self._logits(X).numpy()
        return N[:, 1] - N[:, 0] if len(self.classes_) == 2 else N

    def predict_proba(self, X: ArrayLike) -> Array:
        """p = softmax(N) along the classes, ``(n, K)``. No label enters."""
        p: Array = self._logits(X).softmax(1).numpy()
        return p

    def predict_log_proba(self, X: ArrayLike) -> Array:
        """log p, accurate where p is too small to be told from zero."""
        log_p: Array = self._logits(X).log_softmax(1).numpy()
        return log_p

    def predict(self, X: ArrayLike) -> Array:
        """The class of the largest logit. No label enters."""
        best = self._logits(X).argmax(1).numpy()
        predicted: Array = self.classes_[best]
        return predicted

    @property
    def model_(self) -> Linear:
        """The fitted N = Zθᵀ + b, as ``derive`` and the flows take it."""
        check_is_fitted(self)
        return Linear(torch.from_numpy(self.theta_), torch.from_numpy(self.bias_) if self.fit_intercept else None)

    def _logits(self, X: ArrayLike) -> torch.Tensor:
        check_is_fitted(self)
        return self.model_.logits(_tensor(_validated(self, X, dtype=[self.theta_.dtype], reset=False)))

    def _require_settings(self) -> None:
        settings: dict[str, Any] = self.get_params()
        if not (isinstance(settings["C"], Real) and self.C > 0):
            raise XentflowError(f"C: expected a positive number, or infinity for no penalty, got {self.C!r}")
        if not (isinstance(settings["tol"], Real) and 0 < self.tol < math.inf):
            raise XentflowError(f"tol: expected a positive finite number, got {self.tol!r}")
        if not isinstance(settings["fit_intercept"], bool | np.bool_):
            raise XentflowError(f"fit_intercept: expected True or False, got {self.fit_intercept!r}")
        _require_count("max_iter", self.max_iter)


class FeatureFlow(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Z ↦ Z after ``passes`` of the derived block Z − h(pθ − Cθ), h = 1/L certified, with θ fitted and C the oracle's.

    classifier: what fits θ, ``MultinomialFlowClassifier()`` unless said otherwise; oracle: where C comes from when
    features are transformed, ``SelfPrediction(0.5)``, which sees no labels, unless said otherwise;
    ``NearestNeighbours`` remembers the training samples and their labels, and finds a training sample that is
    transformed again among them; passes: how many steps of the flow.

    leak_labels: with the oracle ``Given``, ``transform`` takes the labels of the samples it moves, as the paper's
    experiment does. Their features then say what their labels are. So this must be True, y be passed, and every such
    transform raises a ``LabelLeakWarning``; in a pipeline, which passes no y to predict, it cannot be used.

    After ``fit``: ``classifier_``, ``oracle_``, ``classes_`` and ``stack_``, the ``Stack`` that moves features.
    """

    def __init__(
        self,
        classifier: MultinomialFlowClassifier | None = None,
        *,
        oracle: Oracle | None = None,
        passes: int = 5,
        leak_labels: bool = False,
    ) -> None:
        self.classifier = classifier
        self.oracle = oracle
        self.passes = passes
        self.leak_labels = leak_labels

    @property
    def uses_labels(self) -> bool:
        """Whether ``transform`` takes the labels of the samples it moves. Every ``fit`` takes those it fits."""
        return self.oracle is not None and self.oracle.uses_labels

    def fit(self, X: ArrayLike, y: ArrayLike) -> "FeatureFlow":
        """Fit θ to samples X ``(n, F)`` and their labels y ``(n,)``, and derive the block."""
        self._require_settings()
        classifier = MultinomialFlowClassifier() if self.classifier is None else clone(self.classifier)
        samples, labels = _validated(self, X, y, dtype=[np.float64, np.float32])
        self.classifier_ = classifier.fit(samples, labels)
        self.classes_: Array = self.classifier_.classes_
        self.oracle_ = SelfPrediction(0.5) if self.oracle is None else copy.deepcopy(self.oracle)
        if isinstance(self.oracle_, NearestNeighbours):
            Z = _tensor(samples)
            self.oracle_.remember(Z, one_hot(self._labels(labels), len(self.classes_)).to(Z.dtype))
        block = derive(
            CrossEntropy("classes"), self.classifier_.model_, oracle=self.oracle_, step=CertifiedStep()
        ).requires_grad_(False)
        self.stack_ = Stack.of(block, depth=int(self.passes))
        return self

    def transform(self, X: ArrayLike, y: ArrayLike | None = None) -> Array:
        """X ``(n, F)`` moved. y: labels of these very samples, for the oracle ``Given`` alone."""
        check_is_fitted(self)
        samples = _validated(self, X, dtype=[self.classifier_.theta_.dtype], reset=False)
        if not self.stack_.uses_labels:
            if y is not None:
                raise XentflowError(
                    f"y: expected none, since the oracle {type(self.oracle_).__name__} makes its own targets, got some"
                )
            return self._moved(samples, None)
        if y is None:
            raise XentflowError("y: expected the labels of the samples to move, since the oracle is Given; got none")
        given = _require(column_or_1d, y)
        if len(given) != len(samples):
            raise XentflowError(f"y: expected one label for each of {len(samples)} samples, got {len(given)}")
        labels = self._labels(given)
        self._warn("FeatureFlow with Given: the labels of the transformed samples enter their features")
        return self._moved(samples, labels)

    def fit_transform(self, X: ArrayLike, y: ArrayLike) -> Array:
        """``fit``, then the same samples moved: with ``Given`` and ``NearestNeighbours`` their own labels enter."""
        self.fit(X, y)
        if self.stack_.uses_labels:
            return self.transform(X, y)
        if isinstance(self.oracle_, NearestNeighbours):
            self._warn("FeatureFlow with NearestNeighbours: training samples find themselves, with their labels")
        return self.transform(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _moved(self, X: Array, labels: torch.Tensor | None) -> Array:
        with torch.no_grad():
            moved: Array = self.stack_(_tensor(X), targets=labels).numpy()
        return moved

    def _labels(self, y: Array) -> torch.Tensor:
        known = np.isin(y, self.classes_)
        if not known.all():
            raise XentflowError(f"y: expected labels seen in fit, {self.classes_.tolist()}, got {y[~known][0]!r}")
        return torch.from_numpy(np.searchsorted(self.classes_, y))

    def _warn(self, message: str) -> None:
        warnings.warn(f"{message}. Scores on them say nothing about unlabelled samples", LabelLeakWarning, stacklevel=3)

    def _require_settings(self) -> None:
        _require_count("passes", self.passes)
        for name, kind in (("classifier", MultinomialFlowClassifier), ("oracle", Oracle)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise XentflowError(f"{name}: expected None or an instance of {kind.__name__}, got {value!r}")
        if self.uses_labels and self.leak_labels is not True:
            raise XentflowError(
                "leak_labels: expected True with the oracle Given, by which the labels of the samples that are "
                f"transformed enter their features, got {self.leak_labels!r}; other oracles need no labels"
            )
        if not self.uses_labels and self.leak_labels is not False:
            raise XentflowError(
                f"leak_labels: expected False with an oracle that takes no labels, got {self.leak_labels!r}"
            )


def _validated(estimator: Any, *arrays: Any, **checks: Any) -> Any:
    return _require(validate_data, estimator, *arrays, **checks)


def _require(check: Any, *arguments: Any, **options: Any) -> Any:
    """scikit-learn's own check, refusing in the package's one kind of error."""
    try:
        return check(*arguments, **options)
    except ValueError as error:
        raise XentflowError(str(error)) from None


def _require_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise XentflowError(f"{name}: expected a positive whole number, got {value!r}")


def _tensor(X: Array) -> torch.Tensor:
    # torch has no read-only tensors and warns of a read-only array; nothing here writes.
    return torch.from_numpy(np.require(X, requirements=["C", "W"]))
