"""Models N(Z): features to logits, with the pullback M ↦ M : ∂_Z N through which every gradient passes.

========= ============ =======================
model     N            pullback(M)
========= ============ =======================
Linear    Zθᵀ + b      Mθ
Quadratic ZθZᵀ         MZθᵀ + MᵀZθ
Bilinear  ZθYᵀ         MYθᵀ
Functional f(Z)        a vector-Jacobian product
========= ============ =======================

A leading dimension H on θ means heads: logits gain it before S, and pullbacks sum over it. There is no softmax here.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from xentflow.axes import Axis, dimension, require_alike, require_finite, require_float_tensor
from xentflow.errors import XentflowError

Roles = Literal["both", "own"]
ModuleT = TypeVar("ModuleT", bound="_ModelModule")
Features = Float[Tensor, "*batch S F"]
Logits = Float[Tensor, "*batch_and_heads S K"]


@dataclass(frozen=True)
class Factors:
    """Logits that are inner products, N = qkᵀ + b, and what then becomes of Mk and Mᵀq in the pullback of M.

    q ``(*batch, [H], S, R)``; k ``([*batch], [H], K, R)``; b ``([H], K)``. The pullback is the sum of ``pull_rows(Mk)``
    and ``pull_columns(Mᵀq)``; None stands for a part that Z does not enter through.
    """

    q: Tensor
    k: Tensor
    bias: Tensor | None
    pull_rows: Callable[[Tensor], Tensor] | None
    pull_columns: Callable[[Tensor], Tensor] | None = None


class Model(ABC):
    """A differentiable map from features to logits."""

    heads: int | None = None
    """H, where logits carry a head dimension before S."""

    pullback_degree: Literal[0, 1] | None = None
    """Degree in Z of the pullback: 0 where N is affine, 1 where it is quadratic, None where nothing is known."""

    is_gradient: bool = True
    """Whether ``pullback`` is the whole derivative, so that moving along it is a gradient flow."""

    @abstractmethod
    def logits(self, Z: Features) -> Logits:
        """N(Z)."""

    def pullback(self, Z: Features, M: Logits, axis: Axis | None = None) -> Features:
        """M : ∂_Z N at Z. The axis matters only to a model in which a token owns one of several roles."""
        pulled: Tensor = torch.func.vjp(self.logits, Z)[1](M)[0]
        return pulled

    def factors(self, Z: Features, axis: Axis) -> Factors | None:
        """The logits as inner products, or None: so attention is computed without keeping them."""
        return None

    def of_head(self, head: int) -> "Model | None":
        """One head as a model without heads, which shares θ; None where there is no such view."""
        return None

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        # A head that is inherited knows nothing of factors that are not.
        if "factors" in cls.__dict__ and "of_head" not in cls.__dict__:
            cls.of_head = Model.of_head  # type: ignore[method-assign]

    def operator_norm(self) -> Tensor:
        """The largest singular value of Z ↦ N(Z) − N(0), where N is affine (a leading dimension: one per sample)."""
        raise XentflowError(f"{type(self).__name__} is not affine in Z: it has no operator norm")

    def logits_like(self, Z: Features) -> Logits:
        """A tensor of the logits' shape and of Z's dtype and device, to be looked at for these alone."""
        return Z.new_empty(()).expand(self._logits_shape(Z))

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """θ and whatever else the model holds."""

    @abstractmethod
    def _logits_shape(self, Z: Features) -> tuple[int, ...]: ...

    def _summed_over_heads(self, pulled: Tensor) -> Tensor:
        return pulled if self.heads is None else pulled.sum(-3)

    def _require_fit(self, Z: Tensor, weight: Tensor, width: int) -> None:
        # Shapes and kinds only: values are looked at where a computation starts, not at every evaluation.
        require_float_tensor("Z", Z, "(*batch, S, F)", 2)
        if Z.shape[-1] != width:
            raise XentflowError(f"Z: expected (*batch, S, {width}) to match theta, got {tuple(Z.shape)}")
        require_alike("Z", Z, "theta", weight)


class _ModelModule(nn.Module, Model):
    """A model that holds its tensors as a module does.

    A tensor given as an ``nn.Parameter`` becomes a parameter of the module; any other becomes a buffer and keeps the
    autograd graph it came with.
    """

    _learnable: ClassVar[tuple[str, ...]] = ()

    def forward(self, Z: Features) -> Logits:
        return self.logits(Z)

    def tensors(self) -> list[Tensor]:
        return [*self.parameters(), *self.buffers()]

    def trainable(self: ModuleT) -> ModuleT:
        """The same model with θ as parameters: those given as ``nn.Parameter`` are shared, other tensors are copied."""
        twin = copy.copy(self)
        # Hooks and other bookkeeping start afresh: those of this module are not the twin's.
        twin.__dict__.update(nn.Module().__dict__, training=self.training, _modules=dict(self._modules))
        twin._parameters, twin._buffers = dict(self._parameters), dict(self._buffers)
        for name in self._learnable:
            value = twin._buffers.pop(name, None)
            if value is not None:
                twin._parameters[name] = nn.Parameter(value.detach().clone())
            elif name not in twin._parameters:
                twin._buffers[name] = None
        return twin

    def _hold(self, name: str, value: Tensor | None) -> None:
        if isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        else:
            self.register_buffer(name, value)


class _LinearMap(Model):
    """What a linear model is, whoever holds θ and b."""

    pullback_degree: Literal[0, 1] | None = 0
    theta: Tensor
    bias: Tensor | None

    def logits(self, Z: Features) -> Logits:
        self._require_fit(Z, self.theta, self.theta.shape[-1])
        N = _through_heads(Z, self.theta.mT)
        return N if self.bias is None else N + self.bias.unsqueeze(-2)

    def pullback(self, Z: Features, M: Logits, axis: Axis | None = None) -> Features:
        return _gathered_from_heads(M, self.theta)

    def factors(self, Z: Features, axis: Axis) -> Factors | None:
        self._require_fit(Z, self.theta, self.theta.shape[-1])
        return Factors(_per_head(Z, self.heads), self.theta, self.bias, self._summed_over_heads)

    def of_head(self, head: int) -> Model | None:
        return None if self.heads is None else _LinearHead(self, head)

    def operator_norm(self) -> Tensor:
        return _spectral_norm(self.theta.flatten(0, -2))

    def _logits_shape(self, Z: Features) -> tuple[int, ...]:
        self._require_fit(Z, self.theta, self.theta.shape[-1])
        return (*Z.shape[:-2], *_head_dimension(self.heads), Z.shape[-2], self.theta.shape[-2])


class _LinearHead(_LinearMap):
    """One head; a plain object, as ``_BilinearAt`` is."""

    def __init__(self, whole: _LinearMap, head: int) -> None:
        self.theta, self.bias = whole.theta[head], None if whole.bias is None else whole.bias[head]

    def tensors(self) -> list[Tensor]:
        return [self.theta] if self.bias is None else [self.theta, self.bias]


class Linear(_ModelModule, _LinearMap):
    """N = Zθᵀ + b; pullback Mθ.

    theta: θ ``(K, F)`` or ``(H, K, F)``; bias: b ``(K,)`` or ``(H, K)``.
    """

    _learnable: ClassVar[tuple[str, ...]] = ("theta", "bias")

    def __init__(self, theta: Float[Tensor, "*H K F"], bias: Float[Tensor, "*H K"] | None = None) -> None:
        super().__init__()
        _require_theta(theta, "(K, F) or (H, K, F)")
        if bias is not None:
            require_float_tensor("bias", bias, "(K,) or (H, K)", 1)
            require_finite("bias", bias)
            require_alike("bias", bias, "theta", theta)
            if bias.shape != theta.shape[:-1]:
                raise XentflowError(f"bias: expected {tuple(theta.shape[:-1])} to match theta, got {tuple(bias.shape)}")
        self.heads = theta.shape[0] if theta.ndim == 3 else None
        self._hold("theta", theta)
        self._hold("bias", bias)


class _QuadraticMap(Model):
    """What a quadratic model is, whoever holds θ, or φ and ψ."""

    pullback_degree: Literal[0, 1] | None = 1
    roles: Roles
    theta: Tensor | None
    phi: Tensor | None
    psi: Tensor | None

    def logits(self, Z: Features) -> Logits:
        self._require_fit(Z, self._weight, self._weight.shape[-2])
        if self.phi is not None:
            queries = _through_heads(Z, self.phi)
            keys = queries if self.psi is None else _through_heads(Z, self.psi)
            return queries @ keys.mT
        assert self.theta is not None
        return _through_heads(Z, self.theta) @ _per_head(Z, self.heads).mT

    def pullback(self, Z: Features, M: Logits, axis: Axis | None = None) -> Features:
        if self.roles == "both":
            return self.query_pullback(Z, M) + self.key_pullback(Z, M)
        if axis is None:
            raise XentflowError('pullback with roles="own": expected the axis, which says which role a token owns')
        return self.query_pullback(Z, M) if dimension(axis) == -1 else self.key_pullback(Z, M)

    def query_pullback(self, Z: Features, M: Logits) -> Features:
        """MZθᵀ: what reaches a token through its row of N."""
        if self.phi is None:
            assert self.theta is not None
            return _gathered_from_heads(M @ _per_head(Z, self.heads), self.theta.mT)
        # Tokens are mixed in R dimensions, where that costs least.
        return _gathered_from_heads(M @ _through_heads(Z, self._keys), self.phi.mT)

    def key_pullback(self, Z: Features, M: Logits) -> Features:
        """MᵀZθ: what reaches a token through its column of N."""
        if self.phi is None:
            assert self.theta is not None
            return _gathered_from_heads(M.mT @ _per_head(Z, self.heads), self.theta)
        return _gathered_from_heads(M.mT @ _through_heads(Z, self.phi), self._keys.mT)

    def factors(self, Z: Features, axis: Axis) -> Factors | None:
        self._require_fit(Z, self._weight, self._weight.shape[-2])
        by_row = self.roles == "both" or dimension(axis) == -1
        by_column = self.roles == "both" or not by_row
        if self.phi is not None:
            q = _through_heads(Z, self.phi)
            k = q if self.psi is None else _through_heads(Z, self.psi)
            rows, columns = _from_heads(self.phi.mT), _from_heads(self._keys.mT)
        else:
            assert self.theta is not None
            q, k = _through_heads(Z, self.theta), _per_head(Z, self.heads)
            rows, columns = _from_heads(self.theta.mT), self._summed_over_heads
        return Factors(q, k, None, rows if by_row else None, columns if by_column else None)

    def of_head(self, head: int) -> Model | None:
        return None if self.heads is None else _QuadraticHead(self, head)

    def pullback_norm(self, M: Logits) -> Tensor:
        """An upper bound, over all samples, of the operator norm of Z ↦ pullback(Z, M)."""
        rows, columns = M.abs().sum(-1).amax(-1), M.abs().sum(-2).amax(-1)
        of_theta = _spectral_norm(self.full_theta())
        bound: Tensor = 2 * (rows * columns).sqrt() * of_theta
        return (bound if self.heads is None else bound.sum(-1)).amax()

    def full_theta(self) -> Float[Tensor, "*H F F"]:
        """θ, formed from φ if need be."""
        if self.phi is not None:
            return self.phi @ self._keys.mT
        assert self.theta is not None
        return self.theta

    def _logits_shape(self, Z: Features) -> tuple[int, ...]:
        self._require_fit(Z, self._weight, self._weight.shape[-2])
        return (*Z.shape[:-2], *_head_dimension(self.heads), Z.shape[-2], Z.shape[-2])

    @property
    def _weight(self) -> Tensor:
        weight = self.phi if self.phi is not None else self.theta
        assert weight is not None
        return weight

    @property
    def _keys(self) -> Tensor:
        keys = self.phi if self.psi is None else self.psi
        assert keys is not None
        return keys


class _QuadraticHead(_QuadraticMap):
    """One head; a plain object, as ``_BilinearAt`` is."""

    def __init__(self, whole: _QuadraticMap, head: int) -> None:
        self.roles, self.is_gradient = whole.roles, whole.is_gradient
        held = whole.theta, whole.phi, whole.psi
        self.theta, self.phi, self.psi = (None if weight is None else weight[head] for weight in held)

    def tensors(self) -> list[Tensor]:
        return [weight for weight in (self.theta, self.phi, self.psi) if weight is not None]


class Quadratic(_ModelModule, _QuadraticMap):
    """N = ZθZᵀ, θ any square matrix; K = S. Pullback MZθᵀ + MᵀZθ.

    A token is a query (its row of N) and a key (its column). ``roles="both"`` is the exact derivative. ``roles="own"``
    keeps the role in which the token owns its distribution, query on the classes axis and key on the sequence axis:
    each token then descends its own ℓ with all that it meets held fixed, its own other role included. That is a game,
    not a gradient flow.

    theta: θ ``(F, F)`` or ``(H, F, F)``; see ``from_factor`` for θ = φφᵀ and θ = φψᵀ.
    """

    _learnable: ClassVar[tuple[str, ...]] = ("theta", "phi", "psi")

    def __init__(self, theta: Float[Tensor, "*H F F"], roles: Roles = "both") -> None:
        super().__init__()
        _require_theta(theta, "(F, F) or (H, F, F)")
        if theta.shape[-1] != theta.shape[-2]:
            raise XentflowError(f"theta: expected a square (F, F) or (H, F, F), got {tuple(theta.shape)}")
        self._set_up(theta, None, None, roles)

    @classmethod
    def from_factor(
        cls, phi: Float[Tensor, "*H F R"], roles: Roles = "both", psi: Float[Tensor, "*H F R"] | None = None
    ) -> "Quadratic":
        """The model with θ = φφᵀ, φ ``(F, R)`` or ``(H, F, R)``, R any rank; θ itself is never formed.

        With ψ like φ, θ = φψᵀ: what a token asks by and what it is found by differ, as queries and keys do.
        """
        _require_theta(phi, "(F, R) or (H, F, R)", name="phi")
        if psi is not None:
            _require_theta(psi, "(F, R) or (H, F, R)", name="psi")
            require_alike("psi", psi, "phi", phi)
            if psi.shape != phi.shape:
                raise XentflowError(f"psi: expected the shape of phi, {tuple(phi.shape)}, got {tuple(psi.shape)}")
        model = cls.__new__(cls)
        super(Quadratic, model).__init__()
        model._set_up(None, phi, psi, roles)
        return model

    def _set_up(self, theta: Tensor | None, phi: Tensor | None, psi: Tensor | None, roles: Roles) -> None:
        if roles not in ("both", "own"):
            raise XentflowError(f'roles: expected "both" or "own", got {roles!r}')
        self.roles = roles
        self.is_gradient = roles == "both"
        self._hold("theta", theta)
        self._hold("phi", phi)
        self._hold("psi", psi)
        weight = self._weight
        self.heads = weight.shape[0] if weight.ndim == 3 else None


class Bilinear(_ModelModule):
    """N = ZθYᵀ for a context Y of its own length and width; pullback MYθᵀ.

    theta: θ ``(F, G)`` or ``(H, F, G)``; context: Y ``(*batch, K, G)``. Where every call has a context of its own, give
    none here and take ``at(context)``.
    """

    pullback_degree: Literal[0, 1] | None = 0
    _learnable: ClassVar[tuple[str, ...]] = ("theta",)
    theta: Tensor
    context: Tensor | None

    def __init__(self, theta: Float[Tensor, "*H F G"], context: Float[Tensor, "*batch K G"] | None = None) -> None:
        super().__init__()
        _require_theta(theta, "(F, G) or (H, F, G)")
        if context is not None:
            _require_context(context, theta)
        self.heads = theta.shape[0] if theta.ndim == 3 else None
        self._hold("theta", theta)
        self._hold("context", context)

    def at(self, context: Float[Tensor, "*batch K G"]) -> Model:
        """The model for another context; it shares θ."""
        _require_context(context, self.theta)
        return _BilinearAt(self.theta, context, self.heads)

    def logits(self, Z: Features) -> Logits:
        return self._here().logits(Z)

    def pullback(self, Z: Features, M: Logits, axis: Axis | None = None) -> Features:
        return self._here().pullback(Z, M)

    def factors(self, Z: Features, axis: Axis) -> Factors | None:
        return self._here().factors(Z, axis)

    def of_head(self, head: int) -> Model | None:
        return self._here().of_head(head)

    def operator_norm(self) -> Tensor:
        return self._here().operator_norm()

    def _logits_shape(self, Z: Features) -> tuple[int, ...]:
        return self._here()._logits_shape(Z)

    def _here(self) -> "_BilinearAt":
        if self.context is None:
            raise XentflowError(
                "Bilinear: expected a context, got none; give one to the model, to the block, or to at()"
            )
        return _BilinearAt(self.theta, self.context, self.heads)


class _BilinearAt(Model):
    """N = ZθYᵀ at one context; a plain object, so that making one inside a compiled block costs nothing."""

    pullback_degree: Literal[0, 1] | None = 0

    def __init__(self, theta: Tensor, context: Tensor, heads: int | None) -> None:
        self.theta, self.context, self.heads = theta, context, heads

    def tensors(self) -> list[Tensor]:
        return [self.theta, self.context]

    def logits(self, Z: Features) -> Logits:
        self._require_batch(Z)
        return _per_head(Z, self.heads) @ self._keys().mT

    def pullback(self, Z: Features, M: Logits, axis: Axis | None = None) -> Features:
        return self._summed_over_heads(M @ self._keys())

    def factors(self, Z: Features, axis: Axis) -> Factors | None:
        self._require_batch(Z)
        return Factors(_per_head(Z, self.heads), self._keys(), None, self._summed_over_heads)

    def of_head(self, head: int) -> Model | None:
        return None if self.heads is None else _BilinearAt(self.theta[head], self.context, None)

    def operator_norm(self) -> Tensor:
        keys = self._keys()
        return _spectral_norm(keys if self.heads is None else keys.flatten(-3, -2))

    def _logits_shape(self, Z: Features) -> tuple[int, ...]:
        self._require_batch(Z)
        return (*Z.shape[:-2], *_head_dimension(self.heads), Z.shape[-2], self.context.shape[-2])

    def _keys(self) -> Tensor:
        return _per_head(self.context, self.heads) @ self.theta.mT

    def _require_batch(self, Z: Tensor) -> None:
        self._require_fit(Z, self.theta, self.theta.shape[-2])
        batch = self.context.shape[:-2]
        if batch and batch != Z.shape[:-2]:
            raise XentflowError(
                f"Z: expected the batch of the context, {tuple(batch)}, got {tuple(Z.shape[:-2])}; "
                "a context without batch dimensions is shared by all"
            )


class Functional(_ModelModule):
    """N = f(Z) for any differentiable f, a network for example, that treats samples of a batch independently.

    fn: Z ``(*batch, S, F)`` to N ``(*batch, S, K)``, or ``(*batch, H, S, K)`` with ``heads=H``.
    """

    def __init__(self, fn: Callable[[Tensor], Tensor], heads: int | None = None) -> None:
        super().__init__()
        if not callable(fn):
            raise XentflowError(f"fn: expected a callable from features to logits, got {type(fn).__name__}")
        if heads is not None and (isinstance(heads, bool) or not isinstance(heads, int) or heads < 1):
            raise XentflowError(f"heads: expected None or a positive whole number, got {heads!r}")
        self.fn = fn
        self.heads = heads

    def logits(self, Z: Features) -> Logits:
        require_float_tensor("Z", Z, "(*batch, S, F)", 2)
        N = self.fn(Z)
        leading = Z.shape[:-2] if self.heads is None else (*Z.shape[:-2], self.heads)
        if not isinstance(N, Tensor) or N.ndim != len(leading) + 2 or N.shape[:-2] != leading:
            came = tuple(N.shape) if isinstance(N, Tensor) else type(N).__name__
            heads = "" if self.heads is None else f"{self.heads}, "
            raise XentflowError(f"fn: expected logits (*batch, {heads}S, K) for Z {tuple(Z.shape)}, got {came}")
        return N

    def _logits_shape(self, Z: Features) -> tuple[int, ...]:
        return tuple(self.logits(Z).shape)


def require_same_kind(model: Model, target_model: Model) -> None:
    """Raise unless the target's half-step can have ``target_model`` beside ``model``: another θ, all else the same."""
    if type(target_model) is not type(model) or target_model.heads != model.heads:
        raise XentflowError(
            f"target_model: expected a {type(model).__name__} with heads {model.heads}, like the model, "
            f"got {type(target_model).__name__} with heads {target_model.heads}"
        )
    if target_model.is_gradient != model.is_gradient:
        raise XentflowError("target_model: expected the roles of the model, got others")
    held = [(getattr(target_model, name, None), getattr(model, name, None)) for name in ("theta", "phi")]
    if target_model is model or any(theirs is ours and isinstance(ours, nn.Parameter) for theirs, ours in held):
        raise XentflowError("target_model: expected a θ of its own, got the model's; leave it out to share θ")


def _require_context(context: Tensor, theta: Tensor) -> None:
    require_float_tensor("context", context, "(*batch, K, G)", 2)
    require_finite("context", context)
    require_alike("context", context, "theta", theta)
    if context.shape[-1] != theta.shape[-1]:
        raise XentflowError(
            f"context: expected (*batch, K, {theta.shape[-1]}) to match theta, got {tuple(context.shape)}"
        )


def _require_theta(value: Tensor, shape: str, name: str = "theta") -> None:
    require_float_tensor(name, value, shape, 2)
    if value.ndim > 3:
        raise XentflowError(f"{name}: expected {shape}, got {tuple(value.shape)}")
    require_finite(name, value)


def _spectral_norm(matrix: Tensor) -> Tensor:
    # No singular values exist in half precision.
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    norm: Tensor = torch.linalg.matrix_norm(wide, 2).to(matrix.dtype)
    return norm


def _head_dimension(heads: int | None) -> tuple[int, ...]:
    return () if heads is None else (heads,)


def _per_head(Z: Tensor, heads: int | None) -> Tensor:
    return Z if heads is None else Z.unsqueeze(-3)


def _through_heads(Z: Tensor, weight: Tensor) -> Tensor:
    """ZW, or ZWₕ of each head in one product of matrices, not one for each sample and head."""
    return Z @ weight if weight.ndim == 2 else torch.einsum("...sf,hfk->...hsk", Z, weight)


def _gathered_from_heads(M: Tensor, weight: Tensor) -> Tensor:
    """MW, or Σₕ MₕWₕ in one product."""
    return M @ weight if weight.ndim == 2 else torch.einsum("...hsk,hkf->...sf", M, weight)


def _from_heads(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda M: _gathered_from_heads(M, weight)
