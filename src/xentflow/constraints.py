"""Where features live: anywhere, on one sphere a token, whitened, or behind a dual variable.

``place(Z)`` brings any features onto the constraint set, ``tangent(Z, V)`` projects a velocity orthogonally onto its
tangent space at Z, and ``retract(Z, V)`` moves from Z by V and back onto the set. With P the tangent projection the
constrained flow Ż = −P ∂_Z ℓ dissipates dℓ/dt = −‖P ∂_Z ℓ‖².

A state Z need not be the features themselves: ℓ is a function of X = ``features(Z)``, which moves by
Ẋ = ``metric(Z, Ż)``, so that in general dℓ/dt = −⟨Ż, metric(Z, Ż)⟩. Both are the identity but for ``Dual``.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from xentflow.axes import is_number, require_alike, require_features, require_float_tensor
from xentflow.errors import XentflowError
from xentflow.models import Features


class Constraint(ABC):
    """A set of states that features are seen of: itself and smooth, or behind a map of its own, ``features``."""

    @abstractmethod
    def place(self, Z: Features) -> Features:
        """A point of the set near Z; Z itself where it already lies in the set."""

    @abstractmethod
    def tangent(self, Z: Features, V: Features) -> Features:
        """The orthogonal projection of V onto the tangent space at Z."""

    @abstractmethod
    def retract(self, Z: Features, V: Features) -> Features:
        """A point of the set that agrees with Z + V to first order in a tangent V."""

    def features(self, Z: Features) -> Features:
        """X, what the model sees at the state Z."""
        return Z

    def metric(self, Z: Features, V: Features) -> Features:
        """How X moves when Z moves by a tangent V: by the derivative of ``features``, positive semidefinite."""
        return V


class _Anywhere(Constraint):
    """States that may lie and move anywhere."""

    def place(self, Z: Features) -> Features:
        require_features(Z)
        return Z

    def tangent(self, Z: Features, V: Features) -> Features:
        _require_move(Z, V)
        return V

    def retract(self, Z: Features, V: Features) -> Features:
        _require_move(Z, V)
        return Z + V


@dataclass(frozen=True)
class Free(_Anywhere):
    """No constraint."""


@dataclass(frozen=True)
class Sphere(Constraint):
    """Every token keeps its norm: what RMSNorm imposes, with radius √F.

    radius: of all tokens; None lets every token keep the norm it comes with.
    """

    radius: float | None = None

    def __post_init__(self) -> None:
        if self.radius is not None and not is_number(self.radius):
            raise XentflowError(f"radius: expected a positive finite number or None, got {self.radius!r}")

    def place(self, Z: Features) -> Features:
        require_features(Z)
        return Z if self.radius is None else self.radius * _polar(Z)[0]

    def tangent(self, Z: Features, V: Features) -> Features:
        _require_move(Z, V)
        unit, _, _ = _polar(Z)
        # A token at the origin is its whole sphere: it has no tangent directions.
        moving = (unit != 0).any(-1, keepdim=True)
        return _across(unit, V) * moving

    def retract(self, Z: Features, V: Features) -> Features:
        _require_move(Z, V)
        unit, _, _ = _polar(Z + V)
        if self.radius is not None:
            return self.radius * unit
        _, norm, scale = _polar(Z)
        return unit * norm * scale.masked_fill(scale.isinf(), 0)


@dataclass(frozen=True)
class Dual(_Anywhere):
    """What pre-norm does: the state Z is free and dual to features on a sphere, X = ∇ψ*(Z) with ψ*(z) = r‖z‖.

    ψ* is conjugate to the indicator of the ball of radius r, so x = r z/‖z‖ is the point of the ball that goes furthest
    along z, and Ż = −∂ℓ(X) is lazy mirror descent, or dual averaging (Nesterov 2009). Where z ≠ 0, ℓ(X) falls along it
    by (r/‖z‖)‖P ∂ℓ‖² for each token, P the projection across z: no part of ∂ℓ needs taking away, since what points
    along z only makes z longer or shorter, d‖z‖²/dt = −2⟨z, ∂ℓ⟩, and later steps shorter or longer. At z = 0 there is
    no such rate: x jumps from there to the sphere.

    radius: r; √F makes X what RMSNorm gives.
    """

    radius: float

    def __post_init__(self) -> None:
        if not is_number(self.radius):
            raise XentflowError(f"radius: expected a positive finite number, got {self.radius!r}")

    def features(self, Z: Features) -> Features:
        return self.radius * _polar(Z)[0]

    def metric(self, Z: Features, V: Features) -> Features:
        _require_move(Z, V)
        # At the origin ψ* has a corner, and no derivative; zero stands for it.
        unit, norm, scale = _polar(Z)
        return self.radius * _across(unit, V) / norm / scale


@dataclass(frozen=True)
class Whitened(Constraint):
    """Each sample's features have ZᵀZ/S = I: uncorrelated, of unit mean square (they are not centred). Needs S ≥ F."""

    def place(self, Z: Features) -> Features:
        require_features(Z)
        return self._orthonormalised(Z)

    def _orthonormalised(self, Z: Features) -> Features:
        tokens, width = Z.shape[-2:]
        if tokens < width:
            raise XentflowError(
                f"Whitened: expected at least as many tokens as features, got {tokens} tokens of {width} features"
            )
        # No QR factorisation exists in half precision.
        Q, R = torch.linalg.qr(Z.to(torch.promote_types(Z.dtype, torch.float32)))
        # A positive diagonal makes the factor unique, and continuous in Z.
        signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(Q.dtype)
        placed: Tensor = math.sqrt(tokens) * Q * signs.unsqueeze(-2)
        return placed.to(Z.dtype)

    def tangent(self, Z: Features, V: Features) -> Features:
        _require_move(Z, V)
        inner = Z.mT @ V
        return V - Z @ (inner + inner.mT) / (2 * Z.shape[-2])

    def retract(self, Z: Features, V: Features) -> Features:
        _require_move(Z, V)
        return self._orthonormalised(Z + V)


def _require_move(Z: Features, V: Features) -> None:
    """Raise unless V can move Z; values are on trust, so that a step which overflows can be told from bad input."""
    require_float_tensor("Z", Z, "(*batch, S, F)", 2)
    require_float_tensor("V", V, "like Z", 2)
    require_alike("V", V, "Z", Z)
    if V.shape != Z.shape:
        raise XentflowError(f"V: expected the shape of Z, {tuple(Z.shape)}, got {tuple(V.shape)}")


def _across(unit: Tensor, V: Tensor) -> Tensor:
    """V without its part along a unit vector of each token."""
    return V - (V * unit).sum(-1, keepdim=True) * unit


def _polar(Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Directions of tokens, and their lengths as a norm times a scale; at the origin zero, one and infinite.

    The scale is a token's largest entry, without which the square of a finite one may be too large or too small. It is
    a constant, since neither directions nor lengths depend on what it is.
    """
    scale = Z.detach().abs().amax(-1, keepdim=True)
    still = scale == 0
    # At the origin nothing is divided by zero and no root has its corner, so derivatives of any order are zero.
    scale = scale.masked_fill(still, math.inf)
    scaled = Z / scale
    norm = (scaled.square().sum(-1, keepdim=True) + still).sqrt()
    return scaled / norm, norm, scale
