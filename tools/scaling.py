"""What many GPUs would do, computed from a record: ``python tools/scaling.py``.

Reads ``docs/scaling.json``, prints the tables and puts them into ``docs/scaling.md``. With W GPUs, g of them in each of
n machines, β₁ and β₂ bytes a second within and between machines, α₁ and α₂ seconds a message, M bytes are gathered (or
reduced and scattered) in

    t(M) = (g − 1)/g · M/β₁ + (n − 1)/n · M/(gβ₂) + α₁ ⌈log₂ g⌉ + α₂ ⌈log₂ n⌉

and an all-reduce is one of each. Nothing here is measured but what the record says was.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
GPUS = (1, 8, 16, 64, 256, 1024)
FLOAT = 4


@dataclass(frozen=True)
class Machines:
    """W GPUs and what connects them."""

    gpus: int
    assumed: dict

    @property
    def inside(self):
        return min(self.gpus, self.assumed["GPUs in a machine"])

    @property
    def count(self):
        return math.ceil(self.gpus / self.inside)

    def gather(self, size):
        """Seconds of t(M)."""
        g, n = self.inside, self.count
        within = (g - 1) / g * size / self._of("bytes a second between GPUs")
        between = (n - 1) / n * size / (g * self._of("bytes a second between machines"))
        first = math.ceil(math.log2(g)) * self._of("seconds a message between GPUs")
        second = math.ceil(math.log2(n)) * self._of("seconds a message between machines")
        return within + between + first + second

    def reduce(self, size):
        """Seconds of an all-reduce."""
        return 2 * self.gather(size)

    def _of(self, name):
        return self.assumed[name]["value"]


def communication(record, machines):
    """Seconds that one step of training communicates, by the way it is shared; bytes and messages with them."""
    training = record["training"]
    size, groups = FLOAT * training["parameters"], training["layers"] + 1
    of_count = machines.reduce(FLOAT)
    # Parameters are gathered for the forward and for the backward pass, gradients reduced, each layer by itself.
    layerwise = 3 * groups * machines.gather(size / groups)
    return {"ddp": machines.reduce(size) + of_count, "fully-shard": layerwise + of_count}


def training(record):
    """Rows: GPUs, images a step, and for each way ms of communication and what is left of the ideal."""
    of, rows = record["training"], []
    for gpus in GPUS:
        cells = [f"{gpus:,}", f"{gpus * of['batch']:,}"]
        for seconds in communication(record, Machines(gpus, record["assumed"])).values():
            hidden = max(of["seconds"], seconds)
            cells += [f"{1e3 * seconds:.2f}"]
            cells += [f"{of['seconds'] / (of['seconds'] + seconds):.0%} to {of['seconds'] / hidden:.0%}"]
        rows.append(cells)
    ways = [f"{way}: {what}" for way in ("ddp", "fully-shard") for what in ("ms of messages", "of the ideal")]
    return table(["GPUs", "images a step", *ways], rows)


def cross_entropy(record):
    """Classes cut: ms of products at least, ms of messages, and the memory of θ on each GPU."""
    of, rows = record["operators"]["linear_cross_entropy"], []
    S, F, K = of["tokens"], of["features"], of["classes"]
    for gpus in GPUS:
        machines = Machines(gpus, record["assumed"])
        # One product in the forward pass, three in the backward one, which makes the logits again.
        products = 4 * 2 * S * F * K / gpus / record["assumed"]["operations a second"]["value"]
        # The label's logit, the largest, the sum; then the gradient of Z.
        messages = 3 * machines.reduce(FLOAT * S) + machines.reduce(FLOAT * S * F)
        rows.append([f"{gpus:,}", *_both(products, messages), f"{FLOAT * F * K / gpus / 2**20:,.0f}"])
    return table(["GPUs", *BOTH, "MiB of θ"], rows)


def self_attention(record):
    """The sequence cut: the same, and the features that a GPU holds at once."""
    of, rows = record["operators"]["self_attention"], []
    S, F = of["tokens"], of["features"]
    for gpus in GPUS:
        machines = Machines(gpus, record["assumed"])
        # Two products forwards; backwards those two again and five for the gradients.
        products = 9 * 2 * S * S * F / gpus / record["assumed"]["operations a second"]["value"]
        # Every piece comes by twice, and its gradient goes back once.
        messages = 3 * gpus * machines.gather(FLOAT * S * F / gpus)
        rows.append([f"{gpus:,}", *_both(products, messages), f"{2 * FLOAT * S * F / gpus / 2**20:,.1f}"])
    return table(["GPUs", *BOTH, "MiB of tokens"], rows)


BOTH = ("ms of products, at least", "ms of messages", "messages' share, at most")


def _both(products, messages):
    return f"{1e3 * products:,.2f}", f"{1e3 * messages:,.2f}", f"{messages / (products + messages):.0%}"


def one_machine(record):
    """What was measured: each way's step, beside the share's step plus the all-reduces."""
    of, rows = record["one machine"], []
    for size, run in of["processes"].items():
        seconds = run["seconds"]
        said = seconds["share"] + seconds["all-reduce"] + seconds["all-reduce of one"]
        rows.append(
            [
                size,
                *(f"{1e3 * seconds[name]:.2f}" for name in ("share", "all-reduce", "all-reduce of one")),
                f"{1e3 * said:.2f}",
                f"{1e3 * seconds['ddp']:.2f}",
                f"{1e3 * seconds['fully-shard']:.2f}",
            ]
        )
    heading = ("processes", "share alone", "all-reduce of θ", "of one number", "their sum", "ddp", "fully-shard")
    return table(heading, rows)


def as_markdown(record):
    """All tables with what they are computed from."""
    of, loss, attention = record["training"], *(record["operators"][name] for name in record["operators"])
    here = record["one machine"]
    assumed = [[name, f"{v['value']:g}", v["source"]] for name, v in record["assumed"].items() if isinstance(v, dict)]
    parameters = next(iter(here["processes"].values()))["parameters"]
    return "\n\n".join(
        [
            f"Measured on {of['device']} ({of['from']}; torch {of['torch']}): a step of the {of['network']} network, "
            f"size `{of['size']}`, {of['parameters']:,} parameters in {of['layers']} layers, on {of['batch']} images "
            f"takes {1e3 * of['seconds']:.2f} ms. Assumed:",
            table(["assumed", "value", "source"], assumed),
            f"**Computed**: training, {of['batch']} images for each GPU. Of the ideal is left the first figure if no "
            "message is sent while anything is computed, the second if all are.",
            training(record),
            f"**Computed**: `sharded.linear_cross_entropy` with gradients, classes cut; {loss['tokens']:,} tokens of "
            f"{loss['features']:,} features, {loss['classes']:,} classes, float32. Products are counted at the highest "
            "rate of the datasheet, which no kernel of ours was measured at.",
            cross_entropy(record),
            f"**Computed** in the same way: `sharded.self_attention` with gradients, {attention['tokens']:,} tokens of "
            f"{attention['features']} features, cut.",
            self_attention(record),
            f"**Measured** on a machine without a GPU ({here['cores']} cores, `{here['backend']}`, torch "
            f"{here['versions']['torch']}): ms of a step on {here['batch']} sequences of the task `{here['task']}`, "
            f"{here['network']} network, size `{here['size']}`, {parameters:,} parameters.",
            one_machine(record),
        ]
    )


def table(heading, rows):
    """Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def quoted(text, record):
    """The document with the tables of this record."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + as_markdown(record) + "\n\n" + END + after


def main():
    record = json.loads((DOCS / "scaling.json").read_text())
    print(as_markdown(record))
    page = DOCS / "scaling.md"
    page.write_text(quoted(page.read_text(), record))


if __name__ == "__main__":
    main()
