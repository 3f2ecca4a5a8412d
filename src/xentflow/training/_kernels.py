"""The compiled inner loops: noise for a block of images, and one Adam step of the linear classifier.

Importing this module imports numba, so only functions that are about to compute do it. All kernels stay in one file
because numba's cache on disk looks at the date of the file a kernel is in, and not at those it calls.

Noise. Threefry-2x32 with 13 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011: the fewest
rounds with a margin over those that pass BigCrush) is a bijection of 64 bits for each key. The key is the seed; the
counter is (image, stream, pixel), so that every pixel of every image in every epoch owns its draw, whichever thread
makes it and in whichever order. The two words (a, b) of one draw become two normals by Box and Muller's transform,

    u = (a + ½)/2³²,   r = √(−2 ln u),   φ = πv/2,   x = ±r cos φ,   y = r sin φ,   v = b/2³¹ with b signed,

for pixels j and j + F/2; φ is on the right half circle and b's lowest bit mirrors it. Resolution: r reaches 6.76 and
has the spacing of 2³² values of u in the tail, so tail probabilities are exact down to about 10⁻⁹; u has float32's
spacing 2⁻²⁴ near 1, so radii below 3·10⁻⁴ (one in 2·10⁷) fall on few values; φ has at least 2²⁴. The logarithm, sine
and cosine are polynomials with a relative error below 3·10⁻⁷, near what float32 resolves.

Every loop below is written so that LLVM turns it into vector instructions: no branch inside, contiguous rows.
"""

# numba infers every type below, and would read annotations as nothing.
# ruff: noqa: ANN001, ANN202
# mypy: allow-untyped-defs, allow-untyped-calls

import inspect
import math
from typing import Any

import numpy as np
from numba import njit

# Sums may be reordered and multiplications fused: that is what lets a dot product use vector registers. The order is
# fixed at compile time, so results repeat bit for bit on one machine. Infinities stay legal.
_FAST = {"nsz", "arcp", "contract", "afn", "reassoc", "nnan"}
_f32, _i32, _u32 = np.float32, np.int32, np.uint32

ROWS = 16
"""Images handled together: their noisy pixels stay in the second-level cache between forward and backward."""

CLASSES = 5
"""θ is padded with zero rows to a multiple of this: 4 images × 5 classes fill the vector registers."""


def _jit(function: Any) -> Any:
    # The tests' checks at run time wrap every function of the package: numba wants what is inside.
    function = inspect.unwrap(function)
    # Without the interpreter's lock, kernels of several threads run at once. Where no folder is writable there is no
    # cache: compiling each time is slower, and still right.
    try:
        return njit(function, nogil=True, fastmath=_FAST, cache=True)
    except RuntimeError:
        return njit(function, nogil=True, fastmath=_FAST)


def _interpolant(function: Any, low: float, high: float, degree: int) -> tuple[np.float32, ...]:
    chebyshev = np.polynomial.Chebyshev.interpolate(function, degree, domain=[low, high])
    power = chebyshev.convert(kind=np.polynomial.Polynomial, domain=[-1, 1], window=[-1, 1])
    return tuple(_f32(c) for c in power.coef)


# log₂(1 + t)/t for |t| ≤ 1/3, and sin(πv/2)/v and cos(πv/2) as functions of v². No node falls on zero.
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7 = _interpolant(lambda t: np.log1p(t) / (t * math.log(2)), -1 / 3, 1 / 3, 7)
_S0, _S1, _S2, _S3, _S4 = _interpolant(lambda q: np.sin(np.pi / 2 * np.sqrt(q)) / np.sqrt(q), 0, 1, 4)
_C0, _C1, _C2, _C3, _C4 = _interpolant(lambda q: np.cos(np.pi / 2 * np.sqrt(q)), 0, 1, 4)


@_jit
def _mix(a, b, r0, r1, r2, r3):
    a = _u32(a + b)
    b = _u32((b << _u32(r0)) | (b >> _u32(32 - r0))) ^ a
    a = _u32(a + b)
    b = _u32((b << _u32(r1)) | (b >> _u32(32 - r1))) ^ a
    a = _u32(a + b)
    b = _u32((b << _u32(r2)) | (b >> _u32(32 - r2))) ^ a
    a = _u32(a + b)
    b = _u32((b << _u32(r3)) | (b >> _u32(32 - r3))) ^ a
    return a, b


@_jit
def threefry(k0, k1, a, b):
    """Threefry-2x32-13 of the counter (a, b) under the key (k0, k1): two words of 32 bits."""
    k2 = _u32(k0 ^ k1 ^ _u32(0x1BD11BDA))
    a, b = _mix(_u32(a + k0), _u32(b + k1), 13, 15, 26, 6)
    a, b = _mix(_u32(a + k1), _u32(b + k2 + _u32(1)), 17, 29, 16, 24)
    a, b = _mix(_u32(a + k2), _u32(b + k0 + _u32(2)), 13, 15, 26, 6)
    a, b = _u32(a + k0), _u32(b + k1 + _u32(3))
    a = _u32(a + b)
    b = _u32((b << _u32(17)) | (b >> _u32(15))) ^ a
    return a, b


@_jit
def _normals(a, b, scale):
    # Two normals of standard deviation std from two words; scale is −2 ln(2) std², so r = √(scale · log₂ u).
    u = _f32(_f32(a) + _f32(0.5))
    bits = u.view(_i32)
    # Split 2³² u into m 2ᵉ with m in [2/3, 4/3): log₂ u is never positive, and is 0 only at u = 1.
    e = _i32(_i32(bits - _i32(0x3F2AAAAB)) >> _i32(23))
    t = _f32(_i32(bits - _i32(e << _i32(23))).view(_f32) - _f32(1))
    log2 = t * (_L0 + t * (_L1 + t * (_L2 + t * (_L3 + t * (_L4 + t * (_L5 + t * (_L6 + t * _L7)))))))
    r = math.sqrt(scale * (log2 + _f32(e - _i32(32))))
    # v in [−1, 1) gives the half circle on the right; the lowest bit of b, lost to v's rounding, picks the side.
    v = _f32(_i32(b)) * _f32(2.0**-31)
    q = v * v
    sine = v * (_S0 + q * (_S1 + q * (_S2 + q * (_S3 + q * _S4))))
    cosine = _f32(_C0 + q * (_C1 + q * (_C2 + q * (_C3 + q * _C4))))
    cosine = _i32(cosine.view(_i32) ^ _i32(_i32(b) << _i32(31))).view(_f32)
    return r * cosine, r * sine


@_jit
def _corrupt_row(out, image, k0, k1, number, stream, affine):
    slope, shift, scale, low, high = affine
    pixels = image.shape[0]
    half = pixels // 2
    for j in range(half):
        a, b = threefry(k0, k1, number, _u32(stream + _u32(j)))
        x, y = _normals(a, b, scale)
        out[j] = min(max(_f32(image[j]) * slope + shift + x, low), high)
        out[j + half] = min(max(_f32(image[j + half]) * slope + shift + y, low), high)
    if pixels % 2:
        a, b = threefry(k0, k1, number, _u32(stream + _u32(half)))
        x, y = _normals(a, b, scale)
        out[pixels - 1] = min(max(_f32(image[pixels - 1]) * slope + shift + x, low), high)


@_jit
def corrupt(out, images, index, k0, k1, stream, affine):
    """out[i] = clamp(slope · pixel + shift + noise, low, high) for the images named in ``index``.

    out: ``(n, F)`` float32; images: ``(m, F)`` uint8; index: ``(n,)`` int64; k0, k1: the seed; stream: the stream's
    number in the upper 16 bits; affine: (slope, shift, −2 ln(2) std², low, high), all float32.
    """
    for i in range(index.shape[0]):
        number = index[i]
        _corrupt_row(out[i], images[number], k0, k1, _u32(number), stream, affine)


@_jit
def _dot_4x5(N, r, k, x0, x1, x2, x3, w0, w1, w2, w3, w4):
    # Twenty running sums in registers, for nine loads: a plain dot product would wait for memory instead.
    z = _f32(0)
    a0, a1, a2, a3, a4, b0, b1, b2, b3, b4 = z, z, z, z, z, z, z, z, z, z
    c0, c1, c2, c3, c4, d0, d1, d2, d3, d4 = z, z, z, z, z, z, z, z, z, z
    for j in range(x0.shape[0]):
        p, q, s, t = x0[j], x1[j], x2[j], x3[j]
        v0, v1, v2, v3, v4 = w0[j], w1[j], w2[j], w3[j], w4[j]
        a0, a1, a2, a3, a4 = a0 + p * v0, a1 + p * v1, a2 + p * v2, a3 + p * v3, a4 + p * v4
        b0, b1, b2, b3, b4 = b0 + q * v0, b1 + q * v1, b2 + q * v2, b3 + q * v3, b4 + q * v4
        c0, c1, c2, c3, c4 = c0 + s * v0, c1 + s * v1, c2 + s * v2, c3 + s * v3, c4 + s * v4
        d0, d1, d2, d3, d4 = d0 + t * v0, d1 + t * v1, d2 + t * v2, d3 + t * v3, d4 + t * v4
    N[r, k], N[r, k + 1], N[r, k + 2], N[r, k + 3], N[r, k + 4] = a0, a1, a2, a3, a4
    N[r + 1, k], N[r + 1, k + 1], N[r + 1, k + 2], N[r + 1, k + 3], N[r + 1, k + 4] = b0, b1, b2, b3, b4
    N[r + 2, k], N[r + 2, k + 1], N[r + 2, k + 2], N[r + 2, k + 3], N[r + 2, k + 4] = c0, c1, c2, c3, c4
    N[r + 3, k], N[r + 3, k + 1], N[r + 3, k + 2], N[r + 3, k + 3], N[r + 3, k + 4] = d0, d1, d2, d3, d4


@_jit
def _residual(N, R, bias, labels, index, first, rows, classes):
    # R = (p − C)ᵀ for ``rows`` images, zero for the rest of the block; the sum of their cross-entropies.
    loss = 0.0
    for r in range(rows):
        label = labels[index[first + r]]
        top = _f32(-math.inf)
        for k in range(classes):
            N[r, k] += bias[k]
            top = max(top, N[r, k])
        own = N[r, label] - top
        total = _f32(0)
        for k in range(classes):
            N[r, k] = math.exp(N[r, k] - top)
            total += N[r, k]
        loss += math.log(total) - own
        for k in range(classes):
            R[k, r] = N[r, k] / total
        R[label, r] -= _f32(1)
    for r in range(rows, ROWS):
        for k in range(classes):
            R[k, r] = _f32(0)
    return loss


@_jit
def _accumulate_5x4(g0, g1, g2, g3, g4, R, k, r, x0, x1, x2, x3):
    # Five rows of the gradient take in four images at once: twenty products for nine loads, as above.
    a0, a1, a2, a3, a4 = R[k, r], R[k + 1, r], R[k + 2, r], R[k + 3, r], R[k + 4, r]
    b0, b1, b2, b3, b4 = R[k, r + 1], R[k + 1, r + 1], R[k + 2, r + 1], R[k + 3, r + 1], R[k + 4, r + 1]
    c0, c1, c2, c3, c4 = R[k, r + 2], R[k + 1, r + 2], R[k + 2, r + 2], R[k + 3, r + 2], R[k + 4, r + 2]
    d0, d1, d2, d3, d4 = R[k, r + 3], R[k + 1, r + 3], R[k + 2, r + 3], R[k + 3, r + 3], R[k + 4, r + 3]
    for j in range(x0.shape[0]):
        p, q, s, t = x0[j], x1[j], x2[j], x3[j]
        u0 = g0[j] + a0 * p + b0 * q + c0 * s + d0 * t
        u1 = g1[j] + a1 * p + b1 * q + c1 * s + d1 * t
        u2 = g2[j] + a2 * p + b2 * q + c2 * s + d2 * t
        u3 = g3[j] + a3 * p + b3 * q + c3 * s + d3 * t
        u4 = g4[j] + a4 * p + b4 * q + c4 * s + d4 * t
        g0[j], g1[j], g2[j], g3[j], g4[j] = u0, u1, u2, u3, u4


@_jit
def gradient(G, b, Z, theta, bias, labels, index, classes):
    """G = (p − C)ᵀZ and b = Σ(p − C) over a batch; returns the sum of its cross-entropies.

    G, theta: ``(K', F)`` with K' a multiple of CLASSES, rows beyond ``classes`` zero; Z: ``(m, F)``, m a multiple of
    ROWS; labels and ``index`` ``(n,)``, n ≤ m: row i of Z is the image ``index[i]``.
    """
    padded, pixels = theta.shape
    size = index.shape[0]
    N = np.empty((ROWS, padded), np.float32)
    R = np.zeros((padded, ROWS), np.float32)
    for k in range(padded):
        b[k] = _f32(0)
        for j in range(pixels):
            G[k, j] = _f32(0)
    loss = 0.0
    for first in range(0, size, ROWS):
        X = Z[first : first + ROWS]
        for k in range(0, padded, CLASSES):
            for r in range(0, ROWS, 4):
                _dot_4x5(
                    N, r, k, X[r], X[r + 1], X[r + 2], X[r + 3],
                    theta[k], theta[k + 1], theta[k + 2], theta[k + 3], theta[k + 4],
                )  # fmt: skip
        loss += _residual(N, R, bias, labels, index, first, min(ROWS, size - first), classes)
        for k in range(0, padded, CLASSES):
            for r in range(0, ROWS, 4):
                _accumulate_5x4(
                    G[k], G[k + 1], G[k + 2], G[k + 3], G[k + 4], R, k, r, X[r], X[r + 1], X[r + 2], X[r + 3]
                )
        for k in range(classes):
            for r in range(ROWS):
                b[k] += R[k, r]
    return loss


@_jit
def _adam(w, m, v, g, mean, rate, root, beta1, beta2, eps):
    for j in range(w.shape[0]):
        step = g[j] * mean
        m_new = beta1 * m[j] + (_f32(1) - beta1) * step
        v_new = beta2 * v[j] + (_f32(1) - beta2) * step * step
        m[j] = m_new
        v[j] = v_new
        w[j] -= rate * m_new / (math.sqrt(v_new) * root + eps)


@_jit
def train_step(Z, labels, index, theta, bias, G, M, V, small, step, lr, classes, with_bias):
    """One step of Adam on the mean cross-entropy of a batch, in place; returns the sum of its cross-entropies.

    The formula is torch.optim.Adam's, with its default β = (0.9, 0.999) and ε = 1e-8. G, M, V: gradient and moments of
    theta; small: ``(3, K')``, the same of the bias; step: 1 for the first; see ``gradient`` for the rest.
    """
    loss = gradient(G, small[0], Z, theta, bias, labels, index, classes)
    mean = _f32(1 / index.shape[0])
    rate = _f32(lr / (1 - 0.9**step))
    root = _f32(1 / math.sqrt(1 - 0.999**step))
    beta1, beta2, eps = _f32(0.9), _f32(0.999), _f32(1e-8)
    for k in range(classes):
        _adam(theta[k], M[k], V[k], G[k], mean, rate, root, beta1, beta2, eps)
    if with_bias:
        _adam(bias[:classes], small[1], small[2], small[0], mean, rate, root, beta1, beta2, eps)
    return loss
