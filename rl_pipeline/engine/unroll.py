"""What an eager step launches, in a row: without modules, autograd's engine and views of weights.

On small networks Python and autograd cost more than the kernels. A step that has run often enough
is traced (`graphs.trace`) and its kernels are called one after another from then on, if the result
is bit for bit the same.
"""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from rl_pipeline.engine.graphs import Call, CompileLog, preserved, trace

aten = torch.ops.aten

AFTER = 3_000
"""Calls before a step is traced: that takes about a second, half of a millisecond's gain each."""
FORMS = 4
"""Forms of input that one step may have in a row; further ones go through autograd."""

DIRECT = {
    aten.add.Tensor: torch.add, aten.addmm.default: torch.addmm, aten.cat.default: torch.cat,
    aten.div.Tensor: torch.div, aten.exp.default: torch.exp, aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul, aten.neg.default: torch.neg, aten.relu.default: torch.relu,
    aten.sub.Tensor: torch.sub, aten.sum.dim_IntList: torch.sum, aten.t.default: torch.t,
    aten.tanh.default: torch.tanh, aten.view.default: torch.Tensor.view,
}  # fmt: skip
"""The same kernels by torch's own bindings, whose calls cost half of an operator's."""


def in_a_row(graph: fx.GraphModule, state: Sequence[Tensor]) -> Call:
    """A graph of `trace` as plain calls; it is changed. Takes the inputs only.

    Its first arguments are `state`: tensors that stay where they are, so that views of them are
    taken once.
    """
    nodes = graph.graph
    views = dict(zip(nodes.find_nodes(op="placeholder"), state, strict=False))
    for node in list(nodes.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.detach.default:  # nothing is recorded here
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default and node.args[0].target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
        elif _is_view(node) and all(x in views for x in node.all_input_nodes):
            args = fx.map_arg(node.args, views.__getitem__)
            views[node] = node.target(*args, **node.kwargs)
        node.target = DIRECT.get(node.target, node.target)
    for i, (node, tensor) in enumerate(views.items()):
        # A plain attribute: a buffer's goes through nn.Module's own.
        graph.__dict__[f"view{i}"] = tensor
        with nodes.inserting_before(node):
            node.replace_all_uses_with(nodes.create_node("get_attr", f"view{i}"))
    nodes.eliminate_dead_code()
    for node in nodes.find_nodes(op="placeholder")[: len(state)]:
        nodes.erase_node(node)
    graph.recompile()
    return graph.forward


def _is_view(node: fx.Node) -> bool:
    """Whether all that it returns are views of its arguments, none of which it changes."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    aliases = [x.alias_info for x in schema.returns] if schema else []
    return bool(aliases) and all(x is not None and not x.is_write for x in aliases)


class Unrolled:
    """A function by autograd, and after `AFTER` calls by its kernels in a row."""

    def __init__(
        self,
        eager: Callable[..., tuple[Tensor, ...]],
        pure: Callable[..., tuple[Tensor, ...]],
        state: Sequence[Tensor],
        written: Tensor,
        log: CompileLog,
        after: int | None = None,
    ) -> None:
        """`eager(*inputs)` leaves gradients in `written`; `pure(*state, *inputs)` returns them
        before its other outputs, and changes nothing. It is traced after AFTER calls, or `after`.
        """
        self._eager, self._pure, self._state = eager, pure, tuple(state)
        self._written, self._log = written, log
        self._calls = dict[tuple, Call | None]()
        self._left = AFTER if after is None else after

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `eager` returns; gradients are added to `written`, which must be zero."""
        if self._left:
            self._left -= 1
            return self._eager(*inputs)
        form = tuple([(x.shape, x.stride(), x.dtype) for x in inputs])
        if form not in self._calls:
            with self._log.phase():
                self._calls[form] = self._unroll(inputs) if len(self._calls) < FORMS else None
        call = self._calls[form]
        if call is None:
            return self._eager(*inputs)
        with torch.no_grad():
            grads, *outputs = call(*inputs)
            self._written.copy_(grads)
        return tuple(outputs)

    def _unroll(self, inputs: Sequence[Tensor]) -> Call | None:
        """The kernels in a row; None where they cannot be had, or give another result."""
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph = trace(self._pure, (*self._state, *inputs))
                call = in_a_row(graph, self._state)
            with torch.no_grad():
                grads, *outputs = call(*inputs)
            with preserved([self._written]):
                expected = [*self._eager(*inputs), self._written.clone()]
            same = all(torch.equal(a, b) for a, b in zip([*outputs, grads], expected, strict=True))
            return call if same else None
        except Exception:  # what cannot be traced runs as it did
            return None
        finally:
            self._log.unroll_s += time.perf_counter() - begin
