"""Trains a small GPT on real text from scratch: dense, static sparse, and sparse with a pattern that RigL moves.

    python examples/train_sparse_gpt.py            or, shorter:    python examples/train_sparse_gpt.py --steps 100

The three models see the same batches. In the sparse ones every linear layer of the transformer blocks is a
`BlockSparseLinear` of the given density; static and RigL begin with the same random pattern and the same values, and
have the same cost of a step. The table and the plot show the loss on text that no model trained on.

Needs: pip install matplotlib tqdm. Nothing is downloaded: the text is the docstrings of your Python's own standard
library, see library_text.py.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from arguments import add_shared, check_shared
from library_text import docstrings, module_paths
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from pytorch_block_sparse import BlockSparseLinear, SparseOptimizer
from pytorch_block_sparse.plotting import new_figure
from pytorch_block_sparse.text import table
from pytorch_block_sparse.training import RigL

CONTEXT = 64  # characters
BATCH = 12
HELD_OUT_SHARE = 0.05
EVALUATION_BATCHES = 16
EVALUATIONS = 20  # in a training
COLORS = {"dense": "#9aa5b1", "static": "#d1652d", "RigL": "#1f6feb"}


@dataclass
class Run:
    """One training."""

    name: str
    parameters: int
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # nats per character, held-out
    step_ms: float = 0.0
    moved: int = 0  # blocks


# The model


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, width: int, heads: int, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> [batch, time, width]."""
        batch, time_, width = x.shape
        q, k, v = self.qkv(x).view(batch, time_, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, time, width / heads]
        return self.out(mixed.transpose(1, 2).reshape(batch, time_, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, linear)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> [batch, time, width]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(functional.gelu(self.up(self.feed_norm(x))))


class GPT(nn.Module):
    """Characters in, logits of the next character out. ``linear(in, out)`` makes the blocks' linear layers."""

    def __init__(self, vocabulary: int, width: int, layers: int, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, width // 64 or 1, linear) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] -> [batch, time, vocabulary]."""
        x = self.characters(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


# The text


def read_text(characters: int) -> tuple[str, str]:
    """(training text, held-out text): docstrings of the standard library, no module in both, printable ASCII."""
    wanted = (int(characters * HELD_OUT_SHARE), characters)
    parts: tuple[list[str], list[str]] = ([], [])
    sizes = [0, 0]
    for path in module_paths():
        text = "".join(f"{text}\n\n" for text in docstrings(path) if len(text) > 40 and text.isascii())
        target = 0 if sizes[0] < wanted[0] else 1
        parts[target].append(text)
        sizes[target] += len(text)
        if sizes[1] >= wanted[1]:
            break
    return "".join(parts[1])[: wanted[1]], "".join(parts[0])[: wanted[0]]


def encode(text: str, vocabulary: list[str]) -> Tensor:
    """Characters -> int64 [len(text)]; what is not in the vocabulary becomes its first character."""
    places = {character: place for place, character in enumerate(vocabulary)}
    return torch.tensor([places.get(character, 0) for character in text])


def draw_batches(data: Tensor, count: int, seed: int) -> list[Tensor]:
    """``count`` batches [BATCH, CONTEXT + 1] at random places of ``data``."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - CONTEXT, (count, BATCH), generator=generator)
    return list(data[starts[..., None] + torch.arange(CONTEXT + 1)])


# Training


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of the next character, nats."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Tensor]) -> float:
    """Mean loss over ``batches``."""
    return statistics.fmean(loss_of(model, batch).item() for batch in batches)


def make_model(name: str, vocabulary: int, options: argparse.Namespace) -> GPT:
    """The model of a run; static and RigL begin alike."""

    def sparse(inputs: int, outputs: int) -> BlockSparseLinear:
        return BlockSparseLinear(inputs, outputs, density=options.density, block_shape=(options.block, options.block))

    torch.manual_seed(0)
    linear = nn.Linear if name == "dense" else sparse
    return GPT(vocabulary, options.width, options.layers, linear).to(options.device)


def train(
    name: str, batches: list[Tensor], held_out: list[Tensor], vocabulary: int, options: argparse.Namespace, bar: tqdm
) -> Run:
    model = make_model(name, vocabulary, options)
    run = Run(name, sum(parameter.numel() for parameter in model.blocks.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, (0.9, 0.99), fused=True)
    if name == "RigL":
        # In so short a training few and rare moves do better: a new block needs time to grow, and begins at zero.
        interval, stop = max(1, options.steps // 10), max(1, options.steps * 3 // 4)
        optimizer = SparseOptimizer(model, optimizer, method=RigL(stop=stop, interval=interval, fraction=0.1))
    warm_up = max(1, options.steps // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / warm_up) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / options.steps)) / 2),
    )
    durations = []
    every = max(1, options.steps // EVALUATIONS)
    for step, batch in enumerate(batches, 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
        durations.append(time.perf_counter() - begin)
        if name == "RigL":
            run.moved += sum(update.moved for update in optimizer.last_update if update.step == step)
        if step % every == 0 or step == options.steps:
            run.steps.append(step)
            run.losses.append(evaluate(model, held_out))
            bar.set_postfix_str(f"held-out loss {run.losses[-1]:.3f}")
        bar.update()
    run.step_ms = 1e3 * statistics.median(durations)
    return run


def main() -> None:
    options = parse_arguments()
    training, held_out = read_text(options.characters)
    vocabulary = sorted(set(training))
    batches, evaluation = (
        [batch.to(options.device) for batch in draw_batches(encode(text, vocabulary), count, seed)]
        for text, count, seed in ((training, options.steps, 1), (held_out, EVALUATION_BATCHES, 2))
    )
    with tqdm(total=options.steps * len(COLORS), unit="step") as bar:
        runs = []
        for name in COLORS:
            bar.set_description(f"{name:6}")
            runs.append(train(name, batches, evaluation, len(vocabulary), options, bar))
    print_table(runs, len(training), options)
    print(f"\nplot: {plot(runs, options)}")


# The table, the plot and the command line


def print_table(runs: list[Run], characters: int, options: argparse.Namespace) -> None:
    dense = runs[0]
    header = ["", "parameters", "ms/step", "speed-up", "held-out loss", "bits/char", "blocks moved"]
    rows = [
        [
            run.name,
            f"{run.parameters / 1e6:.2f} M",
            f"{run.step_ms:.0f}",
            f"{dense.step_ms / run.step_ms:.2f}x",
            f"{run.losses[-1]:.4f}",
            f"{run.losses[-1] / math.log(2):.3f}",
            run.moved,
        ]
        for run in runs
    ]
    print(
        f"\nA GPT of {options.layers} layers, {options.width} wide, on {characters / 1e3:.0f} thousand characters of "
        f"docstrings; {options.steps} steps of {BATCH} x {CONTEXT}\ncharacters on {options.device}, "
        f"{torch.get_num_threads()} threads. Sparse: density {options.density:g} in blocks of "
        f"{options.block}x{options.block}. Parameters are those of the transformer blocks.\n"
    )
    print(table(header, rows))


def plot(runs: list[Run], options: argparse.Namespace) -> Path:
    """Draws the loss curves; returns the PNG's path."""
    figure = new_figure(figsize=(7, 4.2))
    axis = figure.subplots()
    for run in runs:
        label = run.name if run.name == "dense" else f"{run.name}, density {options.density:g}"
        axis.plot(run.steps, run.losses, label=f"{label}: {run.losses[-1]:.3f}", color=COLORS[run.name], linewidth=2)
    axis.set(xlabel="step", ylabel="held-out loss, nats per character", title="A small GPT trained from scratch")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.legend()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "train_sparse_gpt.png"
    figure.savefig(path, dpi=120)
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=1000, help="of each of the three trainings")
    add("--density", type=float, default=0.25, help="share of the blocks that the sparse models store")
    add("--block", type=int, default=16, help="side of a block")
    add("--width", type=int, default=192, help="of the model, a multiple of 64")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--learning-rate", type=float, default=1e-3)
    add("--characters", type=int, default=600_000, help="training text")
    add_shared(parser)
    options = parser.parse_args()
    for name, low in (("steps", 1), ("block", 1), ("width", 64), ("layers", 1), ("characters", 10_000)):
        if getattr(options, name) < low:
            parser.error(f"argument --{name}: must be at least {low}, got {getattr(options, name)}")
    if options.width % 64:
        parser.error(f"argument --width: must be a multiple of 64, got {options.width}")
    if not options.learning_rate > 0:
        parser.error(f"argument --learning-rate: must be positive, got {options.learning_rate}")
    check_shared(parser, options, [options.density])
    return options


if __name__ == "__main__":
    main()
