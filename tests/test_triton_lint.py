"""Rules of the Triton sources that no run without a GPU can see broken."""

from __future__ import annotations

import ast

import pytest
from triton_support import ROOT

SOURCES = sorted(ROOT.glob("kernels/*.py"))


def _calls(tree, name):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


def _is_stride(node):
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name) and "stride" in node.id


def _converted(tree):
    """Names that are assigned conversions to tl.int64."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                yield from (t.id for t, v in pairs if isinstance(t, ast.Name) and _is_64_bit(v, ()))


def _is_64_bit(node, converted):
    """A conversion to tl.int64 (or an axis unrolled at compile time) however it is indexed."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call):
        return any(isinstance(a, ast.Attribute) and a.attr == "int64" for a in node.args)
    return isinstance(node, ast.Name) and (node.id == "axis" or node.id in converted)


def dots_without_precision(tree):
    return [c.lineno for c in _calls(tree, "dot") if "input_precision" not in {k.arg for k in c.keywords}]


def narrow_offsets(tree):
    wrong = []
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        converted = set(_converted(function))
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                for stride, other in ((node.left, node.right), (node.right, node.left)):
                    if _is_stride(stride) and not _is_64_bit(other, converted):
                        wrong.append(node.lineno)
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_rules(path):
    tree = ast.parse(path.read_text())
    assert dots_without_precision(tree) == [], "tl.dot without input_precision"
    assert narrow_offsets(tree) == [], "a stride is multiplied by an offset that is not 64-bit"


def test_the_kernels_are_looked_at():
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    assert sum(len(list(_calls(tree, "dot"))) for tree in trees) >= 10
    strides = [n for t in trees for n in ast.walk(t) if isinstance(n, ast.BinOp) and _is_stride(n.right)]
    assert len(strides) >= 10


@pytest.mark.parametrize(
    "source, find",
    [
        ("tl.dot(a, b)", dots_without_precision),
        ("def f(): base + rows[:, None] * strides[2]", narrow_offsets),
        ("def f(): base + row_stride * rows", narrow_offsets),
    ],
)
def test_what_is_wrong_is_found(source, find):
    assert find(ast.parse(source)) == [1]
