"""Search the penalty of MultinomialFlowClassifier in a pipeline, with scikit-learn's LogisticRegression as the control.

Both minimise one objective, so their curves must lie on each other; the best θ is then shown, one row a class. The
figure goes to results/examples.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

from xentflow.estimators import MultinomialFlowClassifier

X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.4, stratify=y, random_state=0)
penalties = np.logspace(-3, 2, 6)
folds = StratifiedKFold(3, shuffle=True, random_state=0)


def search(classifier):
    name = type(classifier).__name__.lower()
    pipeline = make_pipeline(MinMaxScaler(), classifier)
    return GridSearchCV(pipeline, {f"{name}__C": penalties}, cv=folds).fit(X_train, y_train)


ours, control = search(MultinomialFlowClassifier()), search(LogisticRegression(max_iter=5000))
for name, found in (("MultinomialFlowClassifier", ours), ("LogisticRegression", control)):
    best = next(iter(found.best_params_.values()))
    print(f"{name:<26} best C {best:g}, accuracy on test images {found.score(X_test, y_test):.4f}")

figure = Figure(figsize=(10, 4.8), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=(1, 1))
axis = left.subplots()
for found, label, colour, marker in (
    (ours, "MultinomialFlowClassifier", "#0072B2", "o"),
    (control, "LogisticRegression (control)", "#D55E00", "x"),
):
    mean, spread = (found.cv_results_[f"{kind}_test_score"] for kind in ("mean", "std"))
    style = {"fmt": f"-{marker}"} if marker == "o" else {"fmt": f":{marker}", "markersize": 9}
    axis.errorbar(penalties, mean, spread, capsize=3, color=colour, label=label, **style)
axis.set_xscale("log")
axis.set_xlabel("C, inverse strength of the penalty")
axis.set_ylabel("accuracy on held-out folds")
axis.set_title("mean and standard deviation of 3 folds")
axis.grid(True, linewidth=0.4)
axis.legend()
theta = ours.best_estimator_[-1].theta_
most = abs(theta).max()
panels = right.subplots(2, 5)
for panel, row, digit in zip(panels.flat, theta, ours.classes_, strict=True):
    shown = panel.imshow(row.reshape(8, 8), cmap="PuOr_r", vmin=-most, vmax=most)
    panel.set_title(f"row of {digit}", fontsize=10)
    panel.set_xticks([])
    panel.set_yticks([])
right.colorbar(shown, ax=panels, orientation="horizontal", shrink=0.8, label="θ at each of 8 × 8 pixels")
folder = Path("results/examples")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "classify_digits.png", dpi=120)
print(f"figure: {folder / 'classify_digits.png'}")

difference = abs(ours.cv_results_["mean_test_score"] - control.cv_results_["mean_test_score"]).max()
assert difference < 0.005, difference
