"""Move features by the derived block under several oracles, and ask a classifier of nearest neighbours what they tell.

FeatureFlow is fitted on training images; images of a test set are moved, and classified by the nearest moved training
images. Only the oracle differs. With ``Given`` the labels of the test images enter their own features: those lines show
a leak, once with true labels and once with shuffled ones. The figure goes to results/examples.
"""

import warnings
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import minmax_scale

import xentflow as xf
from xentflow.estimators import FeatureFlow, LabelLeakWarning, MultinomialFlowClassifier

PASSES, SEEDS = (0, 1, 2, 4, 8, 16), range(5)
X, y = load_digits(return_X_y=True)
X = minmax_scale(X)
CASES = {
    "Given, true test labels: a leak": (xf.Given(), "true"),
    "Given, shuffled test labels: a leak": (xf.Given(), "shuffled"),
    "SelfPrediction(0.5), no test labels": (xf.SelfPrediction(0.5), None),
    "NearestNeighbours(5), no test labels": (xf.NearestNeighbours(5), None),
    "Uniform: the control": (xf.Uniform(), None),
}


def accuracies(oracle, given, seed):
    """Accuracy on test images after each number of passes; training images are moved by the same block."""
    Z_train, Z_test, y_train, y_test = train_test_split(X, y, test_size=0.4, stratify=y, random_state=seed)
    flow = FeatureFlow(MultinomialFlowClassifier(C=0.1), oracle=oracle, passes=1, leak_labels=given is not None)
    flow.fit(Z_train, y_train)
    theirs, own = {
        "true": (y_test, y_train),
        "shuffled": (np.random.default_rng(seed).permutation(y_test), y_train),
        None: (None, None),
    }[given]
    found = []
    for passes in range(PASSES[-1] + 1):
        if passes:
            Z_train, Z_test = flow.transform(Z_train, own), flow.transform(Z_test, theirs)
        if passes in PASSES:
            found.append(KNeighborsClassifier(5).fit(Z_train, y_train).score(Z_test, y_test))
    return found


figure = Figure(figsize=(8.5, 5.2), layout="constrained")
axis = figure.subplots()
colours = ("#D55E00", "#CC79A7", "#0072B2", "#009E73", "#4a4d52")
results = {}
for (name, (oracle, given)), colour, marker in zip(CASES.items(), colours, "osD^v", strict=True):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LabelLeakWarning)  # the leak is what is shown
        runs = np.array([accuracies(oracle, given, seed) for seed in SEEDS])
    mean, spread = runs.mean(0), runs.std(0, ddof=1)
    results[name] = mean
    places = range(len(PASSES))
    axis.errorbar(places, mean, spread, capsize=3, color=colour, marker=marker, label=name,
                  linestyle="--" if given else "-")  # fmt: skip
    print(f"{name:<38}" + "  ".join(f"{m:.3f} ± {s:.3f}" for m, s in zip(mean, spread, strict=True)))
axis.set_xticks(range(len(PASSES)), [str(passes) for passes in PASSES])
axis.set_xlabel("passes through the block (0: features as they came)")
axis.set_ylabel("accuracy of 5 nearest neighbours on test images")
axis.set_title("Digits moved by the derived block; mean and standard deviation of 5 splits")
axis.grid(True, linewidth=0.4)
axis.legend(loc="lower left")
folder = Path("results/examples")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "move_features.png", dpi=120)
print(f"figure: {folder / 'move_features.png'}")
assert results["Given, true test labels: a leak"][-1] > 0.99
