"""Processes of a gloo group, forked from a server that has imported everything, and what each of them finds."""

import multiprocessing
import os
import pickle
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)


def spawn(work, size, folder, *arguments, timeout=TIMEOUT, dies=()):
    """Run ``work(rank, size, *arguments)`` in so many processes that may talk; what each returns, by rank.

    dies: ranks that are expected to be dead or stopped by the end, of which nothing comes.
    """
    folder = Path(folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["xentflow.experiments.train"])
    processes = [
        context.Process(target=_run, args=(work, rank, size, folder, timeout, arguments)) for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if rank not in dies:
                process.join(120)
                assert not process.is_alive(), f"process {rank} did not end"
    finally:
        for process in processes:
            process.kill()
            process.join()
    found = {rank: pickle.loads((folder / f"found-{rank}").read_bytes()) for rank in range(size) if rank not in dies}
    for error in found.values():
        if isinstance(error, Failed):
            raise AssertionError(str(error))
    return list(found.values())


class Failed(str):
    """What went wrong in a process."""


def _run(work, rank, size, folder, timeout, arguments):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    # Names of machines are not looked up.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size, timeout=timeout
    )
    try:
        found = work(rank, size, *arguments)
    except BaseException:
        found = Failed(traceback.format_exc())
    (folder / f"found-{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
