"""MultinomialFlowClassifier against LogisticRegression on all of Fashion-MNIST's training images (60,000 × 784).

    python benchmarks/multinomial.py [C] [rounds] [most steps of LogisticRegression]

Interleaved, two threads, float32, pixels from 0 to 1. Each objective is computed anew in float64. The floor is two
matrix products for each evaluation of the objective.
"""

import sys
import time
import warnings

import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import cross_entropy

from xentflow.data import load_fashion_mnist
from xentflow.estimators import MultinomialFlowClassifier

torch.set_num_threads(2)
warnings.simplefilter("ignore")  # not converged is said below
C, rounds, steps = (kind(value) for kind, value in zip((float, int, int), [*sys.argv[1:], 1, 3, 100][:3], strict=True))
data = load_fashion_mnist()
X, y = (data.images.flatten(1).float() / 255), data.labels


def objective(theta, bias):
    theta, bias = torch.from_numpy(theta).double(), torch.from_numpy(bias).double()
    parts = zip(X.split(10_000), y.split(10_000), strict=True)
    total = sum(float(cross_entropy(Z.double() @ theta.T + bias, own, reduction="sum")) for Z, own in parts)
    return (total + float(theta.square().sum()) / (2 * C)) / len(X)


def product():
    theta, start = torch.randn(10, X.shape[1]), time.perf_counter()
    _ = (X @ theta.T).T @ X
    return time.perf_counter() - start


print(f"two products: {1e3 * min(product() for _ in range(10)):.0f} ms")
for _ in range(rounds):
    for name, model in (
        ("xentflow", MultinomialFlowClassifier(C=C)),
        (f"LogisticRegression, at most {steps}", LogisticRegression(C=C, max_iter=steps)),
    ):
        start = time.perf_counter()
        model.fit(X.numpy(), y.numpy())
        seconds = time.perf_counter() - start
        fitted = (model.theta_, model.bias_) if hasattr(model, "theta_") else (model.coef_, model.intercept_)
        found = objective(*fitted)
        taken = int(torch.as_tensor(model.n_iter_).max())
        print(f"C = {C:g}  {name:<34}{seconds:8.2f} s  {taken:5d} steps  objective {found:.9f}", flush=True)
