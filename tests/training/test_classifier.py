"""The fast fit is torch's: each step against autograd and torch.optim.Adam, whole fits against the literal recipe."""

import math
import re
import threading

import numpy as np
import pytest
import torch
from tools import prototypes
from torch import nn

import xentflow as xf
from xentflow.errors import XentflowError
from xentflow.training import ClassifierConfig, Corruption, fit_fast, fit_literal, fit_vectorised
from xentflow.training import classifier as fast
from xentflow.training.recipe import start

SHORT = ClassifierConfig(epochs=3, batch=100)


def torch_on_the_same_noise(data, seed, config):
    """The fit by nn.Linear, autograd and torch.optim.Adam, fed by the fast way's own batches."""
    begin = start(data, seed, config)
    classes, pixels = begin.theta.shape
    model = nn.Linear(pixels, classes, bias=config.bias)
    with torch.no_grad():
        model.weight.copy_(begin.theta)
        if config.bias:
            model.bias.copy_(begin.bias)
    optimiser = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    history, total = [], 0.0
    for index, epoch, is_last in fast._batches(begin, config):
        index = torch.from_numpy(index)
        Z = config.corruption.apply(data.images, seed, epoch, index)
        loss = nn.functional.cross_entropy(model(Z), data.labels[index])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += loss.item() * len(index)
        if is_last:
            history.append(total / len(begin.train_index))
            total = 0.0
    return model, history


class TestAgainstTorch:
    @pytest.mark.parametrize("classes", [2, 5, 10, 13])
    @pytest.mark.parametrize("batch", [1, 7, 16, 100, 1000])
    def test_gradient(self, classes, batch, generator):
        """G = (p − C)ᵀZ against autograd, for batches and class counts that do and do not fill the blocks."""
        from xentflow.training import _kernels

        pixels, padded = 63, -(-classes // 5) * 5
        theta = torch.zeros(padded, pixels)
        theta[:classes] = torch.randn(classes, pixels, generator=generator)
        bias = torch.zeros(padded)
        bias[:classes] = torch.randn(classes, generator=generator)
        Z = torch.randn(-(-batch // 16) * 16, pixels, generator=generator)
        labels = torch.randint(classes, (2 * batch,), generator=generator)
        index = torch.randperm(2 * batch, generator=generator)[:batch]
        G, b = np.full((padded, pixels), np.nan, np.float32), np.full(padded, np.nan, np.float32)
        loss = _kernels.gradient(G, b, Z.numpy(), theta.numpy(), bias.numpy(), labels.numpy(), index.numpy(), classes)
        exact, shift = theta[:classes].double().requires_grad_(), bias[:classes].double().requires_grad_()
        expected = nn.functional.cross_entropy(Z[:batch].double() @ exact.T + shift, labels[index], reduction="sum")
        expected.backward()
        assert math.isclose(loss, expected.item(), rel_tol=1e-5, abs_tol=1e-6)
        # Sums of up to 1,000 rounded products of size 1.
        torch.testing.assert_close(torch.from_numpy(G[:classes]).double(), exact.grad, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(torch.from_numpy(b[:classes]).double(), shift.grad, rtol=1e-5, atol=1e-4)
        assert (G[classes:] == 0).all()

    def test_logits_of_any_size(self):
        """Logits beyond the range of exp: the loss is finite and the residual a difference of distributions."""
        from xentflow.training import _kernels

        theta = torch.zeros(5, 4)
        theta[0], theta[1] = 1e4, -1e4
        G, b, Z = np.zeros((5, 4), np.float32), np.zeros(5, np.float32), np.ones((16, 4), np.float32)
        labels, index = np.array([1]), np.array([0])
        loss = _kernels.gradient(G, b, Z, theta.numpy(), np.zeros(5, np.float32), labels, index, 5)
        assert loss == pytest.approx(8e4)
        np.testing.assert_allclose(b, [1, -1, 0, 0, 0], atol=1e-6)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("classes", [3, 10])
    def test_whole_fit_on_the_same_noise(self, classes, bias):
        data = prototypes(classes=classes)
        config = ClassifierConfig(epochs=5, batch=100, bias=bias, learning_rate=3e-3)
        ours = fit_fast(data, 4, config)
        model, history = torch_on_the_same_noise(data, 4, config)
        # Adam divides by √v: where a gradient is near zero, rounding is magnified up to the size of a step.
        torch.testing.assert_close(ours.theta, model.weight.detach(), rtol=0, atol=1e-4)
        torch.testing.assert_close(torch.tensor(ours.history), torch.tensor(history), rtol=1e-5, atol=0)
        if bias:
            torch.testing.assert_close(ours.bias, model.bias.detach(), rtol=0, atol=1e-4)
        else:
            assert ours.bias.eq(0).all()
        assert (ours.theta - start(data, 4, config).theta).abs().max() > 0.05

    def test_start_is_that_of_nn_linear(self):
        begin = start(prototypes(n=1000, side=28), 0, SHORT)
        bound = 1 / 28
        for value in (begin.theta, begin.bias):
            assert value.abs().max() <= bound
        assert begin.theta.abs().max() > 0.99 * bound
        assert begin.theta.std() == pytest.approx(nn.Linear(784, 10).weight.std().item(), rel=0.05)


class TestSameLaw:
    def test_final_loss_and_accuracy_over_seeds(self):
        """Eight seeds each of the fast, the literal and the vectorised way: means within their standard errors."""
        data = prototypes(n=300)
        config = ClassifierConfig(epochs=6, batch=32, learning_rate=3e-3)
        found = {}
        for fit in (fit_fast, fit_literal, fit_vectorised):
            results = []
            for seed in range(8):
                fitted = fit(data, seed, config)
                held_out = fitted.validation_index
                N = fitted.model.logits(config.corruption.clean(data.images[held_out]))
                accuracy = (N.argmax(1) == data.labels[held_out]).double().mean().item()
                results.append((fitted.history[0], fitted.history[-1], accuracy))
            found[fit] = torch.tensor(results, dtype=torch.double)
        for other in (fit_literal, fit_vectorised):
            # Same seeds share split and start, so what is left is the noise alone.
            difference = found[fit_fast] - found[other]
            error = difference.std(0) / math.sqrt(8)
            assert (difference.mean(0).abs() < 5 * error + 1e-9).all(), (difference.mean(0), error)
        assert found[fit_fast][:, 1].mean() < 0.6 * found[fit_fast][:, 0].mean()

    def test_literal_with_workers(self):
        fitted = fit_literal(prototypes(n=60), 0, ClassifierConfig(epochs=2, batch=16), workers=1)
        assert fitted.history[1] < fitted.history[0]

    def test_literal_noise_is_new_at_every_load(self):
        from xentflow.training import NoisyImages

        images = NoisyImages(prototypes(n=5), Corruption())
        (first, label), (second, _) = images[2], images[2]
        assert not torch.equal(first, second)
        assert first.shape == (64,)
        assert label == images.data.labels[2]

    def test_every_epoch_is_all_training_images_in_a_new_order(self):
        config = ClassifierConfig(epochs=3, batch=30)
        begin = start(prototypes(n=50), 0, config)
        epochs = {1: [], 2: [], 3: []}
        for index, epoch, is_last in fast._batches(begin, config):
            epochs[epoch] += index.tolist()
            assert len(index) == (10 if is_last else 30)
        assert all(sorted(order) == sorted(begin.train_index.tolist()) for order in epochs.values())
        orders = [begin.train_index.tolist(), *epochs.values()]
        assert len({tuple(order) for order in orders}) == 4

    def test_noise_is_new_in_every_epoch(self, monkeypatch):
        streams = []
        data = prototypes(n=50)
        draw = fast.Sampler.__call__
        monkeypatch.setattr(
            fast.Sampler,
            "__call__",
            lambda self, out, index, stream: (streams.append(stream), draw(self, out, index, stream)),
        )
        fit_fast(data, 0, ClassifierConfig(epochs=3, batch=30), threads=1)
        assert streams == [1, 1, 2, 2, 3, 3]


class TestReproducible:
    def test_bit_equal_for_any_number_of_threads(self):
        data = prototypes()
        one = fit_fast(data, 7, SHORT, threads=1)
        for threads in (1, 2, 4):
            again = fit_fast(data, 7, SHORT, threads=threads)
            assert torch.equal(one.theta, again.theta)
            assert torch.equal(one.bias, again.bias)
            assert one.history == again.history

    @pytest.mark.parametrize("fit", [fit_fast, fit_literal, fit_vectorised])
    def test_the_seed_decides_and_global_state_does_not(self, fit):
        data = prototypes(n=100)
        config = ClassifierConfig(epochs=2, batch=32)
        state = torch.manual_seed(1).get_state()
        first = fit(data, 7, config)
        assert torch.equal(state, torch.get_rng_state())
        torch.manual_seed(2)
        assert torch.equal(first.theta, fit(data, 7, config).theta)
        assert not torch.equal(first.theta, fit(data, 8, config).theta)

    def test_all_ways_share_split_and_start(self):
        data = prototypes(n=100)
        config = ClassifierConfig(epochs=1, batch=100)
        fits = [fit(data, 3, config) for fit in (fit_fast, fit_literal, fit_vectorised)]
        for fitted in fits:
            assert torch.equal(fitted.train_index, fits[0].train_index)
            assert torch.equal(fitted.validation_index, fits[0].validation_index)
        everything = torch.cat((fits[0].train_index, fits[0].validation_index)).sort().values
        assert torch.equal(everything, torch.arange(100))
        assert len(fits[0].train_index) == 80


class TestRunning:
    def test_progress_after_each_epoch(self):
        seen = []
        fitted = fit_fast(prototypes(), 0, SHORT, on_epoch=lambda epoch, loss: seen.append((epoch, loss)))
        assert seen == list(enumerate(fitted.history, 1))

    @pytest.mark.parametrize("threads", [1, 3])
    def test_interruption_leaves_no_thread_behind(self, threads):
        def interrupt(epoch, loss):
            if epoch == 2:
                raise KeyboardInterrupt

        before = threading.active_count()
        with pytest.raises(KeyboardInterrupt):
            fit_fast(prototypes(), 0, ClassifierConfig(epochs=1000, batch=100), on_epoch=interrupt, threads=threads)
        assert threading.active_count() == before

    def test_an_error_in_a_helping_thread_is_raised(self, monkeypatch):
        def broken(self, out, index, stream):
            raise MemoryError("no room")

        monkeypatch.setattr(fast.Sampler, "__call__", broken)
        with pytest.raises(MemoryError, match="no room"):
            fit_fast(prototypes(), 0, SHORT, threads=2)

    def test_the_model_is_the_packages_own(self):
        data = prototypes()
        fitted = fit_fast(data, 0, SHORT)
        assert isinstance(fitted.model, xf.Linear)
        Z = fitted.config.corruption.clean(data.images)
        torch.testing.assert_close(fitted.model.logits(Z), Z @ fitted.theta.T + fitted.bias)
        assert fit_fast(data, 0, ClassifierConfig(epochs=1, bias=False)).model.bias is None

    def test_the_dataset_is_left_as_it_was(self):
        data = prototypes()
        images, labels = data.images.clone(), data.labels.clone()
        fit_fast(data, 0, SHORT)
        assert torch.equal(images, data.images)
        assert torch.equal(labels, data.labels)


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"epochs": 0}, "epochs: expected an integer from 1 to 65535, got 0"),
            ({"epochs": 65536}, "epochs: expected an integer from 1 to 65535, got 65536"),
            ({"batch": 0}, "batch: expected at least 1, got 0"),
            ({"learning_rate": math.inf}, "learning_rate: expected a finite number above 0, got inf"),
            ({"train_fraction": 1.0}, "train_fraction: expected a number between 0 and 1, got 1.0"),
        ],
    )
    def test_settings(self, arguments, message):
        with pytest.raises(XentflowError, match=re.escape(message)):
            ClassifierConfig(**arguments)

    def test_too_few_images(self):
        with pytest.raises(XentflowError, match=re.escape("data: expected enough images to split by 0.8, got 1")):
            fit_fast(prototypes(n=1), 0)

    def test_seed(self):
        with pytest.raises(XentflowError, match=re.escape("seed: expected an integer from 0 to 2**63 - 1, got -1")):
            fit_fast(prototypes(n=10), -1)
