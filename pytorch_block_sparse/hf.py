"""Block-sparse models in transformers: ``save_pretrained`` and ``from_pretrained`` once this module is imported.

    import pytorch_block_sparse.hf

    model.save_pretrained(directory)                    # a model with BlockSparseLinear layers
    model = AutoModel.from_pretrained(directory)        # has them again

``config.json`` holds the layers' geometry as a ``quantization_config`` of the method "block_sparse", the usual tensor
files hold their ``values``, ``block_coords`` and ``bias``. Loading goes through transformers' registration of
quantization methods; a loaded model is an ordinary one afterwards: it trains, casts and saves as others do, and is not
marked as quantized.

Errors are :class:`BlockSparseError`, raised by ``from_pretrained`` and ``save_pretrained``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .block_sparse import BlockSparseMatrix
from .block_sparse_linear import BlockSparseLinear
from .dense_layers import dense_weight
from .errors import BlockSparseError
from .layer_record import LayerRecord, sparse_layers
from .layer_replacement import check_fits, new_layer, put_layer
from .optional import require
from .pretrained_config import QUANT_METHOD, config_of_records, records_of_config

_EXTRA = "transformers"
_auto = require("transformers.quantizers.auto", _EXTRA)
_HfQuantizer = require("transformers.quantizers.base", _EXTRA).HfQuantizer
_QuantizationConfigMixin = require("transformers.utils.quantization_config", _EXTRA).QuantizationConfigMixin
_PreTrainedModel = require("transformers", _EXTRA).PreTrainedModel
_safetensors = require("safetensors", _EXTRA)


@_auto.register_quantization_config(QUANT_METHOD)
class BlockSparseConfig(_QuantizationConfigMixin):
    """The ``quantization_config`` of a block-sparse model.

    Args:
        layers: geometry of each BlockSparseLinear, as :meth:`LayerRecord.to_json`.
        version: of this format.

    Raises:
        BlockSparseError: another version, or damaged layers.
    """

    def __init__(self, layers: Any = None, version: Any = None, **_: Any) -> None:
        self.quant_method = QUANT_METHOD
        self.records = records_of_config({"layers": layers, "version": version})

    @classmethod
    def of(cls, model: nn.Module) -> BlockSparseConfig:
        """The config of a model's layers as they are now."""
        return cls(**config_of_records(LayerRecord.of(path, layer) for path, layer in sparse_layers(model)))

    def to_dict(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        return config_of_records(self.records)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()


@_auto.register_quantizer(QUANT_METHOD)
class BlockSparseQuantizer(_HfQuantizer):
    """Puts the recorded layers into a model that transformers is loading, and checks what has been loaded.

    transformers calls the hooks in this order: the model is built on the meta device, ``..._before_weight_loading``
    replaces the dense layers, tensors are loaded, ``..._after_weight_loading`` checks them.
    """

    _layers: dict[str, LayerRecord]
    _dtypes: dict[str, torch.dtype]

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raises:
        BlockSparseError: a dense checkpoint is to become sparse on loading: which blocks to keep is not known.
        """
        if not self.pre_quantized:
            raise BlockSparseError(
                "quantization_config: a dense checkpoint cannot be loaded as a block-sparse one; load it, make it "
                "sparse, and save it"
            )

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """True for our tensors: transformers then leaves the check of their shapes to us, who name the layer."""
        return param_name.rpartition(".")[0] in self._layers

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        _check_files(checkpoint_files or [])
        self._layers = _locate(self.quantization_config.records, model)
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, record in self._layers.items():
            check_fits(record, path, modules)
        # The dtype that was asked of from_pretrained is the one that the dense layers have.
        self._dtypes = {path: dense_weight(modules[path]).dtype for path in self._layers}
        for path, record in self._layers.items():
            put_layer(model, record, path, new_layer(record, modules[path], dtype=self._dtypes[path]))

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        for path, record in self._layers.items():
            layer = model.get_submodule(path)
            _check_loaded(layer, record)
            if layer.values.dtype != self._dtypes[path]:
                # Kept in float32 by its model class (T5's wo in float16), whose code casts inputs for nn.Linear only.
                layer.register_forward_pre_hook(_cast_input)
        self.remove_quantization_config(model)

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` may write the model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether it can be trained."""
        return True


def _check_files(paths: list[str]) -> None:
    """A damaged file is named before anything is loaded."""
    for path in paths:
        if str(path).endswith(".safetensors"):
            try:
                with _safetensors.safe_open(path, framework="pt"):
                    pass
            except (_safetensors.SafetensorError, OSError, ValueError) as error:
                raise BlockSparseError(f"{path}: truncated, or no safetensors file: {error}") from None


def _locate(records: tuple[LayerRecord, ...], model: nn.Module) -> dict[str, LayerRecord]:
    """{path in ``model``: record}. As with tensors, the base model's name comes or goes with the head around it.

    A model of another class may lack layers, as it may lack tensors: heads differ. A model of the same class may not.
    """
    modules = {path for path, _ in model.named_modules(remove_duplicate=False)}
    base = f"{model.base_model_prefix}."
    located: dict[str, LayerRecord] = {}
    for record in records:
        candidates = (record.path, record.path.removeprefix(base), base + record.path)
        path = next((candidate for candidate in candidates if candidate in modules), None)
        if path is not None:
            located[path] = record
        elif type(model).__name__ in (model.config.architectures or [type(model).__name__]):
            raise BlockSparseError(f"quantization_config: layer {record.path!r}: the model has no such module")
    if records and not located:
        raise BlockSparseError(f"quantization_config: {type(model).__name__} has none of the sparse layers")
    return located


def _check_loaded(layer: BlockSparseLinear, record: LayerRecord) -> None:
    """Every tensor came from the file, has the recorded shape, and the indices are valid."""
    expected = {"values": (record.nnz, *record.block_shape), "block_coords": (record.nnz, 2)}
    if record.bias:
        expected["bias"] = (record.shape[0],)
    for name, shape in expected.items():
        tensor = getattr(layer, name)
        if tensor.is_meta:
            raise BlockSparseError(
                f"device_map must not offload layer {record.path!r} to the disk: its indices are checked on loading"
            )
        # transformers marks what it has loaded; without the mark the tensor holds whatever the memory held.
        if not getattr(tensor, "_is_hf_initialized", False):
            raise BlockSparseError(f"layer {record.path!r}: {name} is missing in the file")
        if tuple(tensor.shape) != shape:
            raise BlockSparseError(
                f"layer {record.path!r}: {name} must be {shape} as config.json says, the file has {tuple(tensor.shape)}"
            )
    try:
        layer.pattern.validate()
    except BlockSparseError as error:
        raise BlockSparseError(f"layer {record.path!r}: {error}") from None


def _cast_input(layer: BlockSparseLinear, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].to(layer.values.dtype), *inputs[1:])


def _check_saveable(model: nn.Module) -> None:
    if getattr(model, "hf_quantizer", None) is not None:
        raise BlockSparseError(
            f"a model with BlockSparseLinear layers that is also quantized by {model.hf_quantizer.quantization_config} "
            "cannot be saved: config.json has one quantization_config"
        )
    tied = {name.rpartition(".")[0] for name in getattr(model, "all_tied_weights_keys", None) or {}}
    for path, _ in sparse_layers(model):
        if path in tied:
            raise BlockSparseError(
                f"layer {path!r} is block sparse, but config.tie_word_embeddings ties its weight to another one: "
                "loading would tie it again; set it to False, or leave the layer dense"
            )


def _with_layers_in_config(save_pretrained: Any) -> Any:
    """``save_pretrained`` that writes the geometry of block-sparse layers to config.json.

    There is no hook for models that transformers has not loaded as quantized, so the method itself is extended.
    """

    @functools.wraps(save_pretrained)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(sparse_layers(self), None) is None:
            return save_pretrained(self, *args, **kwargs)
        _check_saveable(self)
        before = vars(self.config).copy()
        self.config.quantization_config = BlockSparseConfig.of(self)
        try:
            return save_pretrained(self, *args, **kwargs)
        finally:
            del self.config.quantization_config
            if "quantization_config" in before:
                self.config.quantization_config = before["quantization_config"]

    return wrapper


# Models initialise layers through their parents (``init.normal_(module.c_proj.weight)``). The mark makes transformers
# leave that view alone; whether its values were loaded is read from the parameter itself.
BlockSparseMatrix._is_hf_initialized = True
_PreTrainedModel.save_pretrained = _with_layers_in_config(_PreTrainedModel.save_pretrained)

__all__ = ["BlockSparseConfig", "BlockSparseQuantizer"]
