"""What a trace costs: a stack's pass against its blocks called one by one, and against a pass with its trajectory.

Interleaved in one process, two threads, minimum of many; the trace is asked for Z alone, then for ℓ, then for gradient
norms too, since each is computed only when asked for.
"""

import time

import torch

import xentflow as xf


def fastest(functions, rounds=15):
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main():
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    Z = torch.randn(2, 256, 64, generator=generator)
    theta = torch.randn(4, 64, 64, generator=generator) / 256
    block = xf.derive(xf.CrossEntropy("classes"), xf.Quadratic(theta), oracle=xf.Uniform(), step=0.1)
    stack = xf.Stack.of(block, depth=4)

    def one_by_one():
        X = Z
        for _ in range(4):
            X = block(X)
        return X

    with torch.no_grad():
        best = fastest(
            {
                "blocks one by one": one_by_one,
                "stack, tracing off": lambda: stack(Z),
                "trace of Z": lambda: stack.trajectory(Z).Z,
                "trace of Z and ℓ": lambda: stack.trajectory(Z).energy,
                "trace of Z, ℓ and gradient norms": lambda: (t := stack.trajectory(Z)).energy + t.gradient_norm,
            }
        )
    base = best["blocks one by one"]
    print(f"{'4 blocks, batch 2, S = 256, F = 64, 4 heads, float32':<56}{'ms':>8}{'ratio':>8}")
    for name, seconds in best.items():
        print(f"{name:<56}{1e3 * seconds:>8.1f}{seconds / base:>8.3f}")


if __name__ == "__main__":
    main()
