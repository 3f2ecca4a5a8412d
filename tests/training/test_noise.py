"""The fast sampler draws what the definition draws: bit for bit where that can be asked, and as a law elsewhere."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats
from tools import MANY, correlation, surprise

from xentflow.training import Corruption

READINGS = [
    Corruption(std, clamp, when, normalisation)
    for std, clamp, when, normalisation in itertools.product(
        [1 / 3], [True, False], ["before", "after"], ["half", "unit", "standard"]
    )
]


def name(reading: Corruption) -> str:
    return f"{reading.when}-{'clamped' if reading.clamp else 'free'}-{reading.normalisation}"


# With std 1, no clamp and no normalisation, features of black images are the normals themselves.
BARE = Corruption(1.0, clamp=False, normalisation="unit")


@pytest.fixture(scope="module")
def normals():
    """Three million draws: 8 streams of 500 images of 784 pixels."""
    black = torch.zeros(500, 784, dtype=torch.uint8)
    return torch.stack([BARE.apply(black, seed=20, stream=stream) for stream in range(8)])


class TestGenerator:
    @pytest.mark.parametrize(
        ("key", "counter", "expected"),
        [
            ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
            ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0xFD36D048, 0x2D17272C)),
            ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
        ],
    )
    def test_published_answers(self, key, counter, expected):
        """The known answers of the generator's authors for 13 rounds."""
        from xentflow.training import _kernels

        assert _kernels.threefry(*(np.uint32(word) for word in (*key, *counter))) == expected

    def test_transform_against_float64(self):
        """Box and Muller's formula in double precision, over the corners and random words."""
        from xentflow.training import _kernels

        rng = np.random.default_rng(0)
        corners = [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
        words = [*itertools.product(corners, corners), *rng.integers(0, 2**32, (4000, 2)).tolist()]
        worst = 0.0
        for a, b in words:
            x, y = _kernels._normals(np.uint32(a), np.uint32(b), np.float32(-2 * math.log(2)))
            # float32 keeps 24 bits of a, which near u = 1 is all that separates u from 1.
            u = float(np.float32(a) + np.float32(0.5)) / 2**32
            signed = b - 2**32 if b >= 2**31 else b
            r, angle = math.sqrt(-2 * math.log(u)), math.pi / 2 * signed / 2**31
            side = -1 if b % 2 else 1
            worst = max(worst, abs(x - side * r * math.cos(angle)), abs(y - r * math.sin(angle)))
        assert worst < 3e-6


class TestLaw:
    def test_moments(self, normals):
        g = normals.double().flatten()
        n = len(g)
        # Standard errors of the first four moments of n normals.
        errors = [1, math.sqrt(2), math.sqrt(15), math.sqrt(96)]
        for power, (expected, error) in enumerate(zip([0, 1, 0, 3], errors, strict=True), 1):
            assert abs(g.pow(power).mean() - expected) * math.sqrt(n) / error < MANY

    @pytest.mark.parametrize("sigmas", [2, 3, 4, 4.5])
    def test_tails(self, normals, sigmas):
        probability = stats.norm.sf(sigmas)
        for side in (normals, -normals):
            count = int((side > sigmas).sum())
            low, high = stats.binom.interval(1 - 1e-5, normals.numel(), probability)
            assert low <= count <= high

    def test_far_tail(self, normals):
        assert 4.7 < normals.abs().max() < 6.5

    def test_distance_of_distributions(self, normals):
        assert stats.kstest(normals.flatten().double().numpy(), "norm").pvalue > 1e-4

    def test_each_pixel_place_has_the_law(self, normals):
        """Both members of a Box–Muller pair, at the edge of every vector register."""
        by_place = normals.reshape(-1, 784).double()
        n = len(by_place)
        assert by_place.mean(0).abs().max() * math.sqrt(n) < 5
        assert (by_place.square().mean(0) - 1).abs().max() * math.sqrt(n / 2) < 5

    def test_uniform_bits(self, normals):
        """Φ(g) in 4,096 bins: finer structure than moments show."""
        u = torch.special.ndtr(normals.double().flatten())
        counts = torch.histc(u.float(), 4096, 0, 1)
        assert stats.chisquare(counts.double().numpy()).pvalue > 1e-4

    @pytest.mark.parametrize("reading", READINGS, ids=name)
    def test_every_reading_is_the_literal_one(self, reading):
        """Features of the fast and the literal form: same distribution for each grey level, same mass at the clamp."""
        levels = torch.tensor([0, 1, 100, 254, 255], dtype=torch.uint8)
        images = levels[:, None].expand(5, 40_000).reshape(100, 2000)
        fast = reading.apply(images, seed=1).reshape(5, -1)
        literal = reading.literal(images, torch.Generator().manual_seed(1)).reshape(5, -1)
        for ours, theirs in zip(fast, literal, strict=True):
            # Rounded, so that an edge that differs in its last bit is one value.
            assert stats.ks_2samp(*(x.double().numpy().round(5) for x in (ours, theirs))).pvalue > 1e-4
            if reading.clamp:
                # Both edges hold the same share of the draws.
                for edge in (fast.min(), fast.max()):
                    share = float((theirs - edge).abs().lt(1e-6).double().mean())
                    if share:
                        count = int((ours == edge).sum())
                        assert abs(surprise(count, len(ours), share)) < MANY * math.sqrt(2)
        if reading.clamp:
            # The edges themselves are the same float but for rounding: black and white reach them.
            torch.testing.assert_close(fast.aminmax(), literal.aminmax(), rtol=0, atol=1e-6)

    def test_without_noise_it_is_the_clean_image(self):
        images = torch.randint(256, (7, 9, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        for normalisation in ("half", "unit", "standard"):
            silent = Corruption(0.0, normalisation=normalisation)
            torch.testing.assert_close(silent.apply(images, 0), silent.clean(images), rtol=0, atol=1e-6)
            torch.testing.assert_close(silent.literal(images), silent.clean(images), rtol=0, atol=1e-6)


class TestIndependence:
    """Each measured on the draws and on their squares: a shared radius would show in the squares alone."""

    @pytest.mark.parametrize("power", [1, 2])
    @pytest.mark.parametrize("apart", [1, 2, 16, 28, 391, 392, 393])
    def test_between_pixels(self, normals, apart, power):
        g = normals.pow(power)
        assert abs(correlation(g[..., :-apart], g[..., apart:])) < MANY

    @pytest.mark.parametrize("power", [1, 2])
    @pytest.mark.parametrize("apart", [1, 2, 256])
    def test_between_images(self, normals, apart, power):
        g = normals.pow(power)
        assert abs(correlation(g[:, :-apart], g[:, apart:])) < MANY

    @pytest.mark.parametrize("power", [1, 2])
    @pytest.mark.parametrize("apart", [1, 4])
    def test_between_streams(self, normals, apart, power):
        g = normals.pow(power)
        assert abs(correlation(g[:-apart], g[apart:])) < MANY

    @pytest.mark.parametrize("other", [21, 2**32 + 20, 20 + 2**63])
    def test_between_seeds(self, normals, other):
        g = BARE.apply(torch.zeros(500, 784, dtype=torch.uint8), seed=other)
        for power in (1, 2):
            assert abs(correlation(normals[0].pow(power), g.pow(power))) < MANY

    def test_no_draw_comes_twice(self, normals):
        """Counters that met would repeat a pair of floats; 10⁵ pairs of two 24-bit floats rarely meet by chance."""
        pairs = torch.stack((normals[:2, :128, :392].flatten(), normals[:2, :128, 392:].flatten()), 1)
        assert len(pairs.unique(dim=0)) == len(pairs)

    def test_noise_does_not_depend_on_the_picture(self):
        images = torch.randint(256, (50, 784), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        free = Corruption(clamp=False, normalisation="unit")
        noise = free.apply(images, 3) - free.clean(images)
        torch.testing.assert_close(noise, free.apply(torch.zeros_like(images), 3), rtol=0, atol=5e-7)


class TestReproducible:
    IMAGES = torch.randint(256, (101, 7, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))

    def test_bit_equal_for_any_number_of_threads(self):
        one = Corruption().apply(self.IMAGES, 9, threads=1)
        for threads in (2, 3, 8, 500):
            assert torch.equal(one, Corruption().apply(self.IMAGES, 9, threads=threads))

    def test_an_image_keeps_its_noise_whatever_else_is_asked_for(self):
        index = torch.tensor([100, 3, 3, 57])
        assert torch.equal(Corruption().apply(self.IMAGES, 9)[index], Corruption().apply(self.IMAGES, 9, index=index))

    def test_seed_and_stream_matter(self):
        base = Corruption().apply(self.IMAGES, 9)
        assert not torch.equal(base, Corruption().apply(self.IMAGES, 10))
        assert not torch.equal(base, Corruption().apply(self.IMAGES, 9, stream=1))

    def test_an_odd_number_of_pixels_leaves_none_out(self):
        g = BARE.apply(torch.zeros(2000, 63, dtype=torch.uint8), seed=2)
        assert (g.square().mean(0) - 1).abs().max() * math.sqrt(1000) < 5
        assert (g != 0).all()

    def test_non_contiguous_images(self):
        turned = self.IMAGES.transpose(1, 2)
        assert torch.equal(Corruption().apply(turned, 4), Corruption().apply(turned.contiguous(), 4))

    def test_global_generators_are_left_alone(self):
        before = torch.get_rng_state()
        Corruption().apply(self.IMAGES, 9)
        assert torch.equal(before, torch.get_rng_state())


def test_numba_is_imported_by_who_computes_only():
    code = (
        "import sys, xentflow.training, xentflow.data;"
        "assert not {'numba', 'matplotlib'} & set(sys.modules), 'imported too early'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
