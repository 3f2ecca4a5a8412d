"""What sharing costs on one machine: ``python benchmarks/scaling.py docs/scaling.json`` puts it into that record.

In every one of 2 and 4 processes, one thread each, interleaved: a training step on this process's share of the batch
with nobody else asked, the same step with DDP and with fully_shard, an all-reduce of as many numbers as the network has
parameters, and of one number. The formula of ``tools/scaling.py`` has a step with DDP as the first plus these two.
"""

import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from xentflow.experiments.train import TrainConfig, make_network, make_task, make_trainer
from xentflow.networks import count
from xentflow.records import versions, write_whole
from xentflow.training.parallel import ALONE, joined

ROUNDS, STEPS, BATCH = 7, 8, 64
CONFIG = TrainConfig(task="recall", batch=BATCH, steps=10**6)


def work(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    with joined("ddp") as ddp, joined("fully-shard") as sharded:
        ways = {"share": (ALONE, BATCH // size), "ddp": (ddp, BATCH), "fully-shard": (sharded, BATCH)}
        trainers = {}
        for name, (processes, batch) in ways.items():
            config = replace(CONFIG, batch=batch)
            task = make_task(config)
            trainers[name] = make_trainer(config, make_network(config, task), task, processes)
            trainers[name].begin_pass()
        parameters = count(trainers["share"].network)
        messages = {"all-reduce": torch.zeros(parameters), "all-reduce of one": torch.zeros(1)}
        acts = {name: trainer.advance for name, trainer in trainers.items()}
        acts |= {name: lambda message=message: dist.all_reduce(message) for name, message in messages.items()}
        seconds = {name: [] for name in acts}
        for turn in range(ROUNDS + 1):
            for name, act in acts.items():
                if name in trainers:
                    trainers[name].begin_pass()
                dist.barrier()
                began = time.perf_counter()
                for _ in range(STEPS):
                    act()
                dist.barrier()
                if turn:  # the first round warms up
                    seconds[name].append((time.perf_counter() - began) / STEPS)
    if rank == 0:
        found = {name: median(taken) for name, taken in seconds.items()}
        Path(folder, "found.json").write_text(json.dumps({"parameters": parameters, "seconds": found}))
    dist.destroy_process_group()


def measured(size):
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=work, args=(rank, size, folder)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return json.loads(Path(folder, "found.json").read_text())


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    path = Path(sys.argv[1])
    record = json.loads(path.read_text()) if path.exists() else {}
    runs = {str(size): measured(size) for size in (2, 4)}
    record["one machine"] = {
        "task": CONFIG.task,
        "network": CONFIG.network,
        "size": CONFIG.size,
        "batch": BATCH,
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "backend": "gloo",
        "versions": versions(),
        "processes": runs,
    }
    write_whole(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    print(json.dumps(runs, indent=1))
