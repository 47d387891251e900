"""Finding the activation module that follows a linear layer, and nothing else, so that the layer can compute it.

A layer and its activation are called by the forward of the module that holds both. Its source is read, not traced: so
every branch counts, whatever the inputs, the mode and the optional arguments. What is not one of a few plain forms is
refused. Code outside of that module that calls the layer or the activation by itself is not seen.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from ..dense_origin import activation_of
from .layers import TargetLayer

NOTHING_FOLLOWS = "no activation module follows it"

# Code that may run at another time than where it stands, or leave a statement half-way.
_INDIRECT = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ClassDef,
    ast.Try,
    ast.Yield,
    ast.YieldFrom,
    ast.Global,
)


class NotFusable(Exception):
    """Why a layer cannot compute an activation."""


def fuse_activations(targets: Sequence[TargetLayer]) -> tuple[list[TargetLayer], dict[str, str]]:
    """The targets with the activations that they can compute, and {name: why not} of the others.

    A target whose activation a rule names is left as it is.
    """
    fused: list[TargetLayer] = []
    reasons: dict[str, str] = {}
    for target in targets:
        if target.activation_pinned:
            reasons[target.name] = "a rule names its activation"
        else:
            try:
                name = following_activation(target)
                activation = activation_of(target.places[0][0]._modules[name])
                target = replace(target, activation=activation, activation_name=name)
            except NotFusable as reason:
                reasons[target.name] = str(reason)
        fused.append(target)
    return fused, reasons


def following_activation(target: TargetLayer) -> str:
    """The attribute of the layer's parent whose module is one of the layer's activations, and follows only this layer.

    Raises:
        NotFusable: there is none, or it cannot be shown.
    """
    if len(target.places) > 1:
        raise NotFusable("the layer hangs in several places")
    parent, attribute = target.places[0]
    if type(parent).forward is nn.Sequential.forward:
        names = list(parent._modules)
        name = next(iter(names[names.index(attribute) + 1 :]), None)
    else:
        name = _consumer(type(parent), attribute)
    follower = parent._modules.get(name)
    if follower is None:
        raise NotFusable(NOTHING_FOLLOWS)
    if "forward" in vars(parent):
        raise NotFusable(f"the forward of its {type(parent).__name__} has been replaced")
    if activation_of(follower) is None:
        # A norm or a dropout: nobody expects it to be fused.
        known = type(follower).__module__.endswith(("activation", "activations"))
        raise NotFusable(
            f"{type(follower).__name__} is no activation of BlockSparseLinear" if known else NOTHING_FOLLOWS
        )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(follower, each) for each in hooks):
        raise NotFusable(f"its {type(follower).__name__} has hooks, which would be lost")
    return name


def _consumer(parent: type[nn.Module], layer: str) -> str | None:
    """The attribute that the parent's forward calls on what ``self.<layer>`` returns, and on nothing else, or None.

    Raises:
        NotFusable: the source is not there, or says more than this function understands.
    """
    function = _forward_source(parent)
    call = _only_call(function, layer)
    if call is None:
        raise NotFusable(f"{parent.__name__}.forward does not call it once, with one argument")
    consumer = _direct_consumer(function, call) or _next_statement_consumer(function, call)
    if consumer is None or _only_call(function, consumer) is None:
        return None
    self_name = _self_name(function)
    for node in ast.walk(function):
        if isinstance(node, _INDIRECT) and node is not function:
            raise NotFusable(f"{parent.__name__}.forward holds code that runs elsewhere or is left half-way")
    own = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id in (self_name, "super")]
    attributes = list(_attributes_of_self(function))
    if len(own) != len(attributes) or any(hasattr(parent, attribute.attr) for attribute in attributes):
        raise NotFusable(f"{parent.__name__}.forward hands itself on, or calls another method, which may use the layer")
    return consumer


def _forward_source(parent: type[nn.Module]) -> ast.FunctionDef:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(parent.forward))))
    except (OSError, TypeError, SyntaxError):
        raise NotFusable(f"the source of {parent.__name__}.forward is not there") from None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        raise NotFusable(f"{parent.__name__}.forward is no plain method")
    return function


def _self_name(function: ast.FunctionDef) -> str:
    return function.args.args[0].arg


def _attributes_of_self(function: ast.FunctionDef) -> Iterator[ast.Attribute]:
    name = _self_name(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
            yield node


def _only_call(function: ast.FunctionDef, attribute: str) -> ast.Call | None:
    """The call ``self.<attribute>(x)``, if that is all that the function does with the attribute."""
    uses = [node for node in _attributes_of_self(function) if node.attr == attribute]
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and node.func in uses]
    if len(uses) != 1 or len(calls) != 1 or len(calls[0].args) != 1 or calls[0].keywords:
        return None
    return None if isinstance(calls[0].args[0], ast.Starred) else calls[0]


def _called_attribute(node: ast.AST, function: ast.FunctionDef) -> str | None:
    """The name ``act``, if the node is ``self.act(x)``."""
    if isinstance(node, ast.Call) and node.func in list(_attributes_of_self(function)):
        return node.func.attr
    return None


def _direct_consumer(function: ast.FunctionDef, call: ast.Call) -> str | None:
    """The name ``act`` where the source says ``self.act(self.layer(x))``."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node.args == [call]:
            return _called_attribute(node, function)
    return None


def _next_statement_consumer(function: ast.FunctionDef, call: ast.Call) -> str | None:
    """The name ``act`` where it says ``h = self.layer(x)``, then ``h = self.act(h)`` or ``return ... self.act(h) ...``.

    The first may assign to another name if ``h`` is read nowhere else.
    """
    for statements in _statement_lists(function):
        for first, second in itertools.pairwise(statements):
            if not isinstance(first, ast.Assign) or first.value is not call or len(first.targets) != 1:
                continue
            if not isinstance(first.targets[0], ast.Name) or not isinstance(second, (ast.Assign, ast.Return)):
                return None
            name = first.targets[0].id
            reads, everywhere = _reads(second, name), _reads(function, name)
            rebound = isinstance(second, ast.Assign) and [_name(target) for target in second.targets] == [name]
            gone = isinstance(second, ast.Return) or rebound or len(everywhere) == 1
            if len(reads) != 1 or not gone:
                return None
            for node in ast.walk(second.value):
                if isinstance(node, ast.Call) and node.args == reads:
                    return _called_attribute(node, function)
    return None


def _statement_lists(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for field in ("body", "orelse"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                yield statements


def _reads(node: ast.AST, name: str) -> list[ast.expr]:
    return [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Load)
    ]


def _name(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


__all__ = ["NOTHING_FOLLOWS", "NotFusable", "following_activation", "fuse_activations"]
