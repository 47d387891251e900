"""distill(), and the 2020 interface of BlockSparseModelPatcher."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pytorch_block_sparse import BlockSparseError, BlockSparseLinear, BlockSparseModelPatcher, distill, sparsify
from pytorch_block_sparse.sparsify import PseudoBlockSparseLinear, cosine_loss, kl_loss


def pair(density: float = 0.5) -> tuple[nn.Module, nn.Module]:
    """(student, teacher)."""
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 24))
    student = sparsify(teacher, density, block_shape=(8, 8), inplace=False).model
    return student, teacher


def inputs(count: int = 8) -> list[torch.Tensor]:
    return [torch.randn(32, 32) for _ in range(count)]


def mean_loss(student, teacher, batches, loss=cosine_loss) -> float:
    student, teacher = copy.deepcopy(student).eval(), copy.deepcopy(teacher).eval()
    with torch.no_grad():
        return sum(loss(student(x), teacher(x)).item() for x in batches) / len(batches)


# distill


def test_distillation_brings_the_student_to_the_teacher():
    student, teacher = pair()
    batches, unseen = inputs(), inputs(2)
    before, teacher_before = mean_loss(student, teacher, unseen), copy.deepcopy(teacher.state_dict())
    patterns = [layer.pattern for layer in student if isinstance(layer, BlockSparseLinear)]
    report = distill(student, teacher, batches, steps=150, learning_rate=3e-3, progress=False)
    assert report.steps == 150 and report.seconds > 0
    assert mean_loss(student, teacher, unseen) < 0.5 * before
    assert all(torch.equal(tensor, teacher_before[name]) for name, tensor in teacher.state_dict().items())
    assert patterns == [layer.pattern for layer in student if isinstance(layer, BlockSparseLinear)]
    assert student.training and teacher.training, "modes are as before"
    assert all(parameter.grad is None for parameter in student.parameters())


def test_distillation_follows_the_seed_and_shows_its_progress(capsys):
    students = []
    for _ in range(2):
        torch.manual_seed(0)
        student, teacher = pair()
        distill(student, teacher, inputs(3), steps=5)
        students.append(student.state_dict())
    assert all(torch.equal(tensor, students[1][name]) for name, tensor in students[0].items())
    assert "distill" in capsys.readouterr().err


def test_distillation_stops_in_time_and_takes_every_batch_once_by_default():
    student, teacher = pair()
    assert distill(student, teacher, inputs(5), progress=False).steps == 5
    assert 0.2 <= distill(student, teacher, inputs(5), seconds=0.2, progress=False).seconds < 2


def test_distillation_trains_only_what_it_is_given():
    student, teacher = pair()
    before = copy.deepcopy(student.state_dict())
    distill(student, teacher, inputs(3), parameters=[student[3].values], progress=False)
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"3.values"}


@pytest.mark.parametrize("name", ["logits", "last_hidden_state"])
def test_model_outputs_choose_the_loss_and_masked_tokens_do_not_count(name):
    class Model(nn.Module):
        def __init__(self, values):
            super().__init__()
            self.values = nn.Parameter(values)

        def forward(self, x, attention_mask):
            return SimpleNamespace(**{name: x + self.values})

    teacher, student = Model(torch.randn(6)), Model(torch.randn(6))
    x, mask = torch.randn(2, 4, 6), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    loss = kl_loss() if name == "logits" else cosine_loss
    with torch.no_grad():
        expected = loss((x + student.values)[mask == 1], (x + teacher.values)[mask == 1]).item()
    report = distill(student, teacher, [{"x": x, "attention_mask": mask}], progress=False)
    assert report.losses[0] == pytest.approx(expected, rel=1e-5)


def test_kl_loss_is_the_textbook_one():
    student, teacher = torch.randn(5, 7), torch.randn(5, 7)
    p, q = (teacher / 3).softmax(-1), (student / 3).softmax(-1)
    torch.testing.assert_close(kl_loss(3.0)(student, teacher), 9 * (p * (p / q).log()).sum(-1).mean())
    assert kl_loss()(teacher, teacher).abs() < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 3, "seconds": 1}, "at most one of steps and seconds"),
        ({"steps": 0}, "steps must be a positive number, got 0"),
        ({"learning_rate": -1.0}, "learning_rate must be a positive number"),
        ({"batches": []}, "batches must hold at least one batch"),
        ({"teacher": "model"}, "teacher must be a torch.nn.Module, got str"),
        ({"parameters": []}, "parameters must hold one that requires a gradient"),
        ({"loss": lambda student, teacher: student.sum() * float("nan")}, "loss must be finite, got nan at step 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_distill_refuses(arguments, message):
    student, teacher = pair()
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(BlockSparseError, match=message):
        distill(**{"student": student, "teacher": teacher, "batches": inputs(2), "progress": False, **arguments})
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())
    with pytest.raises(BlockSparseError, match="teacher must be another model"):
        distill(student, student, inputs(2))


# BlockSparseModelPatcher


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 32)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def test_patcher_works_as_in_2020():
    model = Encoder()
    patcher = BlockSparseModelPatcher()
    found = patcher.get_patchable_layers(model)
    assert [entry["regexp"] for entry in found] == [r"layers\.0", r"layers\.1", r"layers\.2", "head"]
    assert found[3]["layer"] is model.head
    patcher.add_pattern(r"layers\.[01]", {"density": 0.5})
    patcher.add_pattern("lay", {"density": 0.25, "block_shape": (16, 16)})
    assert patcher.pattern_match("layers.1") == (True, {"density": 0.5})
    assert patcher.pattern_match("head") == (False, -1)
    report = patcher.patch_model(model)
    assert [layer.density for layer in report.layers] == [0.5, 0.5, 0.25]
    assert model.layers[2].block_shape == (16, 16) and isinstance(model.head, nn.Linear)


def test_pseudo_linear_is_the_block_sparse_layer_computed_densely():
    sparse, pseudo = Encoder(), None
    pseudo = copy.deepcopy(sparse)
    for model, info in ((sparse, {"density": 0.5}), (pseudo, {"density": 0.5, "pseudo_linear": True})):
        patcher = BlockSparseModelPatcher()
        patcher.add_pattern("layers", info)
        patcher.patch_model(model)
    assert isinstance(pseudo.layers[0], PseudoBlockSparseLinear) and "density=0.5" in repr(pseudo.layers[0])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sparse, pseudo)]
    x = torch.randn(8, 64)
    for _ in range(3):
        torch.testing.assert_close(sparse(x), pseudo(x))
        for model, optimizer in zip((sparse, pseudo), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("pattern", "info", "message"),
    [
        ("(", {"density": 0.5}, "pattern must be a regular expression"),
        ("head", {}, "pattern_info must map 'density'"),
        ("head", {"density": 0.5, "size": 1}, "pattern_info must map 'density'"),
        ("tail", {"density": 0.5}, "pattern must match a linear layer's name, got 'tail'"),
        ("head", {"density": 2}, "density must be a number"),
    ],
    ids=["regex", "no-density", "unknown", "no-layer", "density"],
)
def test_patcher_refuses(pattern, info, message):
    model, patcher = Encoder(), BlockSparseModelPatcher()
    with pytest.raises(BlockSparseError, match=message):
        patcher.add_pattern(pattern, info)
        patcher.patch_model(model)
    assert all(isinstance(layer, nn.Linear) for layer in (*model.layers, model.head))
