"""What the trainer, its log and its progress cost a step, over a loop written by hand on the same network and batches.

Both ways train one network on the same plan of batches, interleaved, one thread; the hand-written loop makes the
batches, too, and leaves out only what the trainer adds: sums of loss and accuracy, the rate's schedule, progress.
"""

import time
from statistics import median

import torch
from rich.console import Console

from xentflow.experiments.train import TrainConfig, _progress, make_network, make_task, make_trainer

ROUNDS, STEPS = 15, 20
torch.set_num_threads(1)
config = TrainConfig(task="recall", batch=64, steps=10**6)
task = make_task(config)
trainer = make_trainer(config, make_network(config, task), task)
bare = trainer.network  # the very same: where weights lie in memory is worth as much as what is measured
optimiser = torch.optim.AdamW(bare.parameters(), lr=1e-3, fused=True)
plan = task.plan(torch.Generator().manual_seed(0), STEPS, config.batch)


def by_hand():
    for step in range(STEPS):
        x, y = task.batch({name: rows[step] for name, rows in plan.items()})
        loss = torch.nn.functional.cross_entropy(bare(x).flatten(0, -2), y.flatten(), ignore_index=-1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=False)


def by_trainer(advance):
    trainer.begin_pass()
    for _ in range(STEPS):
        trainer.advance()
        trainer.step += 1
        advance()
    trainer.step = 0


def seconds(way, *arguments):
    began = time.perf_counter()
    way(*arguments)
    return (time.perf_counter() - began) / STEPS


with _progress(Console(), trainer) as advance:
    seconds(by_hand), seconds(by_trainer, advance)
    pairs = [(seconds(by_hand), seconds(by_trainer, advance)) for _ in range(ROUNDS)]
hand, trained = (min(column) for column in zip(*pairs, strict=True))
ratios = [second / first for first, second in pairs]
print(f"by hand {1e3 * hand:.2f} ms, trainer {1e3 * trained:.2f} ms a step (fastest of {ROUNDS} rounds)")
print(f"overhead: {trained / hand - 1:+.1%} of the fastest, {median(ratios) - 1:+.1%} the median of interleaved ratios")
