"""Small transformers models with random weights, how to feed them, and how they become sparse. No assertion here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from pytorch_block_sparse import BlockSparseLinear, sparsify
from pytorch_block_sparse.dense_layers import dense_weight, is_conv1d

BLOCK = (16, 8)
VOCABULARY = 60


@dataclass(frozen=True)
class Case:
    """A model to try: ``make()`` builds it, ``inputs()`` draws its input, ``case(model, inputs)`` is its output."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    skip: tuple[str, ...] = ()  # dense layers that stay so: tied ones, and heads

    def dense(self) -> nn.Module:
        """The dense model, always the same; without dropout, so that two models can be compared step by step."""
        torch.manual_seed(0)
        return self.make().eval()

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """The model's logits."""
        return model(**inputs).logits


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape)


def _bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=72,  # no multiple of the block
            max_position_embeddings=16,
        )
    )


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
        )
    )


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=72, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=72,
            image_size=16,
            patch_size=8,
            num_labels=5,
        )
    )


def _padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    return {"input_ids": _tokens(2, 9), "attention_mask": mask}


MODELS = {
    "bert": Case(_bert, _padded, ("classifier",)),
    "gpt2": Case(_gpt2, _padded, ("lm_head",)),
    "llama": Case(_llama, _padded),
    "t5": Case(_t5, lambda: {**_padded(), "decoder_input_ids": _tokens(2, 7)}, ("lm_head",)),
    "vit": Case(_vit, lambda: {"pixel_values": torch.randn(2, 3, 16, 16)}, ("classifier",)),
}


def dense_layers(model: nn.Module, skip: tuple[str, ...] = ()) -> list[str]:
    """Paths of the layers that can be made sparse."""
    return [path for path, module in model.named_modules() if dense_weight(module) is not None and path not in skip]


def make_sparse(dense: nn.Module, density: float, skip: tuple[str, ...] = ()) -> nn.Module:
    """A copy with the strongest blocks of every dense layer."""
    names = [re.escape(path) for path in dense_layers(dense, skip)]
    return sparsify(dense, density, block_shape=BLOCK, include=names, inplace=False).model


def masks(dense: nn.Module, sparse: nn.Module) -> dict[str, Tensor]:
    """{path: bool mask of the dense layer's weight}: true where the sparse model stores a block."""
    result = {}
    for path, module in sparse.named_modules():
        if isinstance(module, BlockSparseLinear):
            mask = module.weight.to_dense(torch.ones_like(module.values)) != 0
            result[path] = mask.t() if is_conv1d(dense.get_submodule(path)) else mask
    return result
