"""ℓ and attention terms with logits N spread over processes, for K or S beyond one machine.

``shard`` names the dimension of N that is cut: with ``"classes"`` each process holds some of the classes, rows of θ;
with ``"sequence"`` some of the tokens, rows of Z. Pieces follow one another in the order of ranks and need not be
equal. What is not cut is the same on every process, and so is its gradient, which all of them get in full.

Where the cut goes through distributions (``shard == axis``), process r has a part of each, with log-sum-exp R_r:

    R = log Σ_r exp R_r,    O = Σ_r exp(R_r − R) O_r

and for labels, with d_r the log-sum-exp over the others that r holds, less the label's own logit,

    ℓ = softplus(log Σ_r exp d_r),

which is never negative, and keeps its digits however confident a row is. Else distributions are whole where they are,
and only what all of them share is summed. All of it goes through the package's own kernels and collectives of
``torch.distributed``: messages are of the size of one token's features times tokens, and no process ever holds N.

Every process of the group makes the same calls in the same order, backward passes among them.
"""

from xentflow.sharded.attention import cross_attention, quadratic_attention, self_attention
from xentflow.sharded.cross_entropy import linear_cross_entropy

__all__ = ["cross_attention", "linear_cross_entropy", "quadratic_attention", "self_attention"]
