"""Whether a network does the same in all its calls, read from its code.

NOTE [One call for all]: what a network does in one call it does in all of them if nothing in its code can make it do
something else. So the code is read first. It may use its own layers, parameters and plain settings (numbers and the
like; where one is changed, there is a new plan), the functions that are known here, loops and conditions over these,
and methods and functions of which the same is true. It may not set anything, draw, look at shapes or at numbers in
tensors, or reach for anything else.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Collection
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

NAMESPACES = (torch, torch.nn, torch.nn.functional)
BUILTINS = {"enumerate", "float", "int", "len", "list", "range", "reversed", "super", "tuple", "zip"}
KNOWN_STEPS = (
    *("LOAD_FAST", "LOAD_CONST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_SMALL_INT", "LOAD_ASSERTION_ERROR"),
    *("STORE_FAST", "STORE_DEREF", "BINARY_", "INPLACE_", "UNARY_", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "TO_BOOL"),
    *("BUILD_", "LIST_", "MAP_ADD", "SET_ADD", "SET_UPDATE", "DICT_", "UNPACK_", "GET_ITER", "GET_LEN", "FOR_ITER"),
    *("END_FOR", "POP_", "JUMP_", "ROT_", "DUP_", "SWAP", "COPY", "PUSH_NULL", "PRECALL", "CALL", "KW_NAMES", "NOP"),
    *("MAKE_", "SET_FUNCTION_ATTRIBUTE", "FORMAT_", "CONVERT_VALUE", "RESUME", "EXTENDED_ARG", "CACHE", "NOT_TAKEN"),
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
)
"""How instructions begin, of all versions of Python, that change nothing but local variables, from top to bottom."""


def is_settled(module: nn.Module, leaves: Collection[type], functions: Collection[str]) -> bool:
    """Whether one call of `module` shows what all of them do; see NOTE [One call for all].

    `leaves` are classes of modules whose calls consist of `functions`, which are those that are known.
    """
    own = [one for one in module.modules() if type(one) not in leaves]
    return all(_is_ordinary(type(one)) and _Reader(one, functions).is_pure(type(one).forward) for one in own)


def is_setting(value: Any) -> bool:
    """Whether it is a plain value that can be compared with what it was before."""
    if isinstance(value, tuple):
        return all(map(is_setting, value))
    return value is None or type(value) in (bool, int, float, str)


def _is_ordinary(kind: Any) -> bool:
    """Whether calls and attributes work as in other modules."""
    same = all(getattr(kind, name) is getattr(nn.Module, name) for name in ("__call__", "__getattr__"))
    return same and kind.__getattribute__ is object.__getattribute__


class _Reader:
    """Reads what the functions of a module do."""

    def __init__(self, module: nn.Module, functions: Collection[str]) -> None:
        self._module, self._functions = module, functions
        self._read: set[CodeType] = set()

    def is_pure(self, function: Any) -> bool:
        """Whether `function`, and whatever it calls, only does what is known."""
        if not isinstance(function, FunctionType) or not set(function.__code__.co_freevars) <= {"__class__"}:
            return False
        if not is_setting((function.__defaults__, *(function.__kwdefaults__ or {}).values())):
            return False
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            if code not in self._read:
                self._read.add(code)
                codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
                if not all(self._is_known(step, function) for step in dis.get_instructions(code)):
                    return False
        return True

    def _is_known(self, step: dis.Instruction, function: FunctionType) -> bool:
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            return self._is_known_name(step.argval, function)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            return self._is_known_attribute(step.argval)
        return step.opname.startswith(KNOWN_STEPS)

    def _is_known_name(self, name: str, function: FunctionType) -> bool:
        found = function.__globals__.get(name, getattr(builtins, name, None))
        if isinstance(found, ModuleType):
            return found in NAMESPACES
        if name in self._functions and any(found is getattr(space, name, None) for space in NAMESPACES):
            return True
        if name in BUILTINS and found is getattr(builtins, name):
            return True
        return (name.isupper() and is_setting(found)) or self.is_pure(found)

    def _is_known_attribute(self, name: str) -> bool:
        """Whether `name`, of whatever it is asked for, can only be something that is known."""
        module = self._module
        if name in module._modules or name in module._parameters or name in module._buffers:
            return True
        if name in vars(module):
            return is_setting(vars(module)[name])
        found = [vars(kind)[name] for kind in type(module).__mro__ if name in vars(kind) and kind is not nn.Module]
        if found:
            is_constant = name.isupper() and all(map(is_setting, found))
            return is_constant or all(self.is_pure(getattr(one, "fget", one)) for one in found)
        return name in self._functions or name in ("nn", "functional", "float32")
