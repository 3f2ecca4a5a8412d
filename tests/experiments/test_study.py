from dataclasses import replace

import pytest
import torch
from small import images

import xentflow as xf
from xentflow.experiments import study
from xentflow.experiments.passes import through_block
from xentflow.experiments.reproduce import ReproduceConfig
from xentflow.experiments.study import FITS, OURS, Fit, Pass, accuracies, passes_of
from xentflow.training import ClassifierConfig, fit_fast


def test_the_grid_is_every_reading_once():
    assert len(FITS) == len(set(FITS)) == 20
    for fit in FITS:
        readings = list(passes_of(fit))
        assert len(readings) == len(set(readings)) == (40 if fit.bias else 20)
    assert OURS[0] in FITS
    assert OURS[1] in list(passes_of(OURS[0]))


@pytest.fixture(scope="module")
def case():
    data = images(200)
    fitted = fit_fast(data, 0, ClassifierConfig(epochs=20, batch=50))
    index = fitted.validation_index
    return fitted, fitted.config.corruption.apply(data.images, 0, 0, index), data.labels[index]


def through(block, Z, labels, targets):
    return [(N.argmax(-1) == labels).double().mean().item() for N, _ in through_block(block, Z, 3, targets)]


@pytest.mark.parametrize(("step", "scaled"), [(1.0, False), (0.5, False), (1.0, True)])
def test_a_reading_over_classes_is_a_derived_block(case, step, scaled):
    fitted, Z, labels = case
    loss = xf.CrossEntropy("classes", temperature=8.0 if scaled else 1.0)
    expected = through(xf.derive(loss, fitted.model, step=step), Z, labels, labels)
    reading = Pass(step=step, scaled=scaled)
    assert accuracies(reading, fitted, Z @ fitted.theta.mT, labels, 3) == pytest.approx(expected)


def test_a_reading_over_images_with_shared_targets_is_a_derived_block(case):
    fitted, Z, labels = case
    C = torch.nn.functional.one_hot(labels, 3).float()
    C = C / C.sum(0)
    expected = through(xf.derive(xf.CrossEntropy("sequence"), fitted.model), Z, labels, C)
    N = Z @ fitted.theta.mT
    assert accuracies(Pass("whole set", shared=True), fitted, N, labels, 3) == pytest.approx(expected)
    # Forty images are one batch.
    assert accuracies(Pass("batch", shared=True), fitted, N, labels, 3) == pytest.approx(expected)


def test_attention_may_forget_the_bias(case):
    fitted, Z, labels = case
    # Large enough that who knows it goes another way.
    bias = torch.tensor([1.0, -1.0, 0.0])
    fitted = replace(fitted, bias=bias)
    C, found = torch.nn.functional.one_hot(labels, 3).float(), {}
    for with_bias in (True, False):
        Y, expected = Z, []
        for _ in range(4):
            N = Y @ fitted.theta.mT
            expected.append(((N + bias).argmax(-1) == labels).double().mean().item())
            Y = Y + 0.5 * (C - (N + bias if with_bias else N).softmax(-1)) @ fitted.theta
        found[with_bias] = accuracies(Pass(step=0.5, with_bias=with_bias), fitted, Z @ fitted.theta.mT, labels, 3)
        assert found[with_bias] == pytest.approx(expected)
    assert found[True] != found[False]


def test_a_batch_knows_nothing_of_another(case, monkeypatch):
    fitted, Z, labels = case
    N, reading = Z @ fitted.theta.mT, Pass("batch", shared=True)
    parts = [
        accuracies(Pass("whole set", shared=True), fitted, N[half], labels[half], 3)
        for half in (slice(25), slice(25, 40))
    ]
    monkeypatch.setattr(study, "BATCH", 25)
    expected = [(25 * first + 15 * second) / 40 for first, second in zip(*parts, strict=True)]
    assert accuracies(reading, fitted, N, labels, 3) == pytest.approx(expected)


def test_the_study_runs_resumes_and_ranks(tmp_path, monkeypatch):
    import io
    import json

    from rich.console import Console

    monkeypatch.setattr(study, "FITS", (Fit(), Fit(clamp=False)))
    settings = ReproduceConfig(study=True, study_seeds=2, epochs=2)
    printed = io.StringIO()
    assert study.run(settings, tmp_path, images(), Console(file=printed, width=200)) == 0
    record = json.loads((tmp_path / "study/result.json").read_text())
    assert record["seeds"] == [0, 1]
    assert len(record["readings"]) == 80
    distances = [row["rmse"] for row in record["readings"]]
    assert distances == sorted(distances)
    text = (tmp_path / "study/study.md").read_text()
    assert "| ours | " in text
    assert "no clamp" in text
    assert "step 0.5" in text
    before = (tmp_path / "study/result.json").read_bytes()
    monkeypatch.setattr(study, "fit_fast", None)
    study.run(settings, tmp_path, images(), Console(file=printed, width=200))
    assert (tmp_path / "study/result.json").read_bytes() == before
