"""Sparse transformers models with Trainer, accelerate's device maps and PEFT."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("safetensors")

import accelerate
import transformers
from model_zoo import MODELS, VOCABULARY, make_sparse

import pytorch_block_sparse.hf  # noqa: F401
from pytorch_block_sparse import BlockSparseError, BlockSparseLinear, SparseOptimizer, sparsify
from pytorch_block_sparse.training import SET, CubicDensity, MagnitudePruning, MovementPruning, RigL

transformers.logging.disable_progress_bar()
CASE = MODELS["bert"]
STEPS, SAVED_AT = 12, 6
METHODS = {
    "RigL": (RigL(stop=100, interval=2), None),
    "SET": (SET(interval=2), None),
    "magnitude": (MagnitudePruning(interval=2), CubicDensity(0.2, end=10)),
    "movement": (MovementPruning(interval=2), CubicDensity(0.2, end=10)),
}


class Sentences(torch.utils.data.Dataset):
    """Random tokens; the first one decides the label."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, VOCABULARY, (9,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[0] % 2}


def make_trainer(folder, method: str) -> tuple[transformers.Trainer, SparseOptimizer]:
    model = make_sparse(CASE.dense(), 0.5, CASE.skip)
    torch.manual_seed(3)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kind, schedule = METHODS[method]
    optimizer = SparseOptimizer(model, inner, method=kind, schedule=schedule)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=SAVED_AT,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Sentences(), optimizers=(optimizer, scheduler))
    return trainer, optimizer


@pytest.mark.parametrize("method", METHODS)
def test_trainer_resumes_bitwise_with_its_sparse_optimizer(method, tmp_path):
    trainer, optimizer = make_trainer(tmp_path, method)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    expected = trainer.model.state_dict()
    name = "bert.encoder.layer.0.intermediate.dense.block_coords"
    assert optimizer.steps == STEPS and not torch.equal(expected[name], before[name])
    resumed, other = make_trainer(tmp_path, method)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED_AT}"))
    found = resumed.model.state_dict()
    assert other.steps == STEPS and other.densities == optimizer.densities
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    loaded = type(trainer.model).from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_map(device_map, tmp_path):
    model, inputs = make_sparse(CASE.dense(), 0.5, CASE.skip), CASE.inputs()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map=device_map)
    device = next(loaded.parameters()).device
    found = CASE(loaded, {name: tensor.to(device) for name, tensor in inputs.items()}).cpu()
    torch.testing.assert_close(found, CASE(model, inputs), rtol=1e-3, atol=1e-4)


def test_weights_kept_elsewhere_while_they_are_not_used(tmp_path):
    model, inputs = make_sparse(CASE.dense(), 0.5, CASE.skip), CASE.inputs()
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu")
    assert offloaded.bert.encoder.layer[0].output.dense.values.is_meta
    assert torch.equal(CASE(offloaded, inputs), CASE(model, inputs))
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(BlockSparseError, match="device_map must not offload layer"):
        type(model).from_pretrained(tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "offload")


# PEFT


@pytest.fixture
def half_sparse():
    """BERT with sparse feed-forward layers and dense attention."""
    names = r"bert\.encoder\.layer\.\d+\.(intermediate|output)\.dense"
    return sparsify(CASE.dense(), 0.5, block_shape=(16, 8), include=names).model


def test_lora_on_dense_layers_beside_sparse_ones(half_sparse, tmp_path):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["query", "value"], r=4)
    model, inputs = peft.get_peft_model(copy.deepcopy(half_sparse), settings), CASE.inputs()
    sparse = [layer for layer in model.modules() if isinstance(layer, BlockSparseLinear)]
    assert len(sparse) == 4 and not any(layer.values.requires_grad for layer in sparse)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs, labels=torch.tensor([0, 1])).loss.backward()
        optimizer.step()
    expected = model.eval()(**inputs).logits
    assert not torch.equal(expected, CASE(half_sparse, inputs))
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(half_sparse), tmp_path / "adapter").eval()
    assert torch.equal(loaded(**inputs).logits, expected)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(CASE(merged, inputs), expected)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(CASE(type(merged).from_pretrained(tmp_path / "merged"), inputs), CASE(merged, inputs))


def test_lora_on_a_sparse_layer_is_refused_by_peft(half_sparse):
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"BlockSparseLinear.*is not supported"):
        peft.get_peft_model(half_sparse, peft.LoraConfig(target_modules=["intermediate.dense"]))
