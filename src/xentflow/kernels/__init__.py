"""Attention terms, ℓ and its gradients in memory linear in S and K: plain forms, and faster ways to the same numbers.

============= ======================================================= =====================================
backend       what                                                    where
============= ======================================================= =====================================
``reference`` the plain forms, S×K logits and all                     anywhere; in ``torch.func`` always
``chunked``   matrix products on tiles, public operations only        any device, masks, second derivatives
``fused``     torch's own attention kernel with its log-sum-exp       no dense mask, values as wide as keys
``auto``      the first where logits are few, else the fastest
============= ======================================================= =====================================
"""

from xentflow.kernels.cross_entropy import cross_entropy
from xentflow.kernels.dispatch import Backend, attend, is_plain, require_backend
from xentflow.kernels.labels import chosen, returned
from xentflow.kernels.loss import Problem
from xentflow.kernels.products import attention_products

__all__ = [
    "Backend",
    "Problem",
    "attend",
    "attention_products",
    "chosen",
    "cross_entropy",
    "is_plain",
    "require_backend",
    "returned",
]
