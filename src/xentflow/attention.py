"""Cross- and self-attention as the paper writes them, with scale 1 and the softmax axis always named.

On the classes axis ``cross_attention(Z, theta)`` is ``scaled_dot_product_attention(Z, theta, theta, scale=1)``: every
query's weights over the keys sum to one. On the sequence axis (the paper's σ_i) every *key's* weights over the queries
sum to one, which no everyday attention layer computes.
"""

from jaxtyping import Float
from torch import Tensor

from xentflow.axes import Axis, dimension, require_alike, require_features, require_finite, require_float_tensor
from xentflow.errors import XentflowError
from xentflow.kernels import Backend, attention_products, require_backend
from xentflow.masks import Masking
from xentflow.models import Features
from xentflow.potentials import LogSumExp


def cross_attention(
    Z: Features, theta: Float[Tensor, "*theta_batch K F"], *, axis: Axis, backend: Backend = "auto"
) -> Features:
    """CA(Z, θ) = softmax(Zθᵀ)θ, for θ ``(K, F)`` or one for each sample, in memory linear in S and K.

    backend: how it is computed; see ``kernels``.
    """
    dimension(axis)
    require_backend(backend)
    require_features(Z)
    require_float_tensor("theta", theta, "(K, F)", 2)
    require_finite("theta", theta)
    require_alike("theta", theta, "Z", Z)
    if theta.shape[-1] != Z.shape[-1]:
        raise XentflowError(f"theta: expected (*batch, K, {Z.shape[-1]}) to match Z, got {tuple(theta.shape)}")
    if theta.ndim > 2 and theta.shape[:-2] != Z.shape[:-2]:
        raise XentflowError(
            f"theta: expected (K, F), or one for each sample of Z {tuple(Z.shape)}, got {tuple(theta.shape)}"
        )
    found = attention_products(LogSumExp(axis), Z, theta, None, Masking(), rows=True, columns=False, backend=backend)
    assert found.rows is not None
    return found.rows


def self_attention(X: Features, *, axis: Axis, backend: Backend = "auto") -> Features:
    """SA(X) = softmax(XXᵀ)X; for θ = φφᵀ the quadratic attention term pZθ is SA(Zφ)φᵀ."""
    require_features(X, "X")
    return cross_attention(X, X, axis=axis, backend=backend)
