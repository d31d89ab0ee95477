"""Whether a policy keeps a tensor of its calls, read from its code.

NOTE [Keeping nothing]: torch is quicker in inference mode, but tensors that were made there can never be trained with.
So what is called there may keep none of them, nor ask for gradients. Code of torch and tensordict does neither. Any
other is read: that of a forward, of hooks, and of all functions of the user's that they lead to. It may use local
variables as it likes, and otherwise only modules, tensors, plain settings, library functions that are known not to keep
what they are given, and objects of which the same is true; it may write to tensors in place, but set no attribute, no
global name and no variable of a function around it. The one exception is a number that is counted up by a number. What
was read is looked at again before each slot: where a name stands for something else, there is a new plan. The first
call is watched besides: if a tensor that was made in it is still alive afterwards, the policy keeps it somewhere.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Collection
from functools import lru_cache
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import tensordict
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
from torch import Tensor, distributions, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from swath.modules.parts import NOT_CALLED, acts_as
from swath.modules.settled import BUILTINS, KNOWN_STEPS, is_setting

LIBRARIES = (torch, nn, functional, distributions, math, tensordict)
"""What a name may stand for whose attributes are known."""
REFUSED = {
    *("autograd", "backward", "enable_grad", "grad", "grad_fn", "inference_mode", "is_grad_enabled", "is_inference"),
    *("is_inference_mode_enabled", "is_leaf", "register_hook", "requires_grad", "requires_grad_", "retain_grad"),
    *("resize_", "retains_grad", "set_", "set_grad_enabled", "share_memory_", "swap_tensors", "to_module", "compile"),
    *("data", "real", "imag", "apply_", "map_", "vmap", "save", "load", "load_state_dict", "memmap_", "memmap"),
    *("from_module", "as_strided_", "detach_", "rename_", "resize_as_", "squeeze_", "swapaxes_", "swapdims_", "t_"),
    *("transpose_", "unsqueeze_"),
}
"""What asks for gradients, tells of the mode, keeps what it is given, or gives it another shape."""
KEPT_BUILTINS = BUILTINS | {
    *("abs", "all", "any", "bool", "dict", "isinstance", "map", "max", "min", "print", "round", "set", "slice"),
    *("sorted", "str", "sum"),
}
MORE_STEPS = (
    *("BEFORE_WITH", "CHECK_EXC_MATCH", "COPY_FREE_VARS", "DELETE_FAST", "LOAD_COMMON_CONSTANT", "LOAD_SPECIAL"),
    *("PUSH_EXC_INFO", "RETURN_GENERATOR", "SETUP_", "STORE_SLICE", "STORE_SUBSCR", "WITH_EXCEPT_START", "YIELD_VALUE"),
)
"""Like `settled.KNOWN_STEPS`; a subscript can only be set of something local or of a tensor, as all else is refused."""
HOLDING = (nn.ParameterDict, nn.ParameterList)
"""Modules that a tensor can be put into by subscript."""
CONVERSIONS = {"apply", "bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"}
"""Of a tensor they make another, but of a module they exchange all that it holds."""
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
CALLED = ("forward", "__call__", "module", "method", "distribution_class")
"""Attributes by which torch and tensordict find what they call."""
NUMBERS = (int, float)
PLAIN = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


@lru_cache(maxsize=1)
def _names() -> set[str]:
    """Attributes of tensors, TensorDicts, distributions and libraries that keep nothing."""
    kinds = [kind for kind in vars(distributions).values() if isinstance(kind, type)]
    found = {name for kind in (Tensor, TensorDict, *kinds) for name in dir(kind)}
    for space in (torch, torch.linalg, torch.special, functional, math):
        known = (
            (BuiltinFunctionType, FunctionType, torch.dtype) if space is not torch else (BuiltinFunctionType, *PLAIN)
        )
        found |= {name for name, value in vars(space).items() if isinstance(value, known)}
    found |= {name for name in dir(torch.functional) if isinstance(getattr(torch, name, None), FunctionType)}
    found |= {kind.__name__ for kind in (Tensor, TensorDict, TensorDictBase, torch.Size, torch.device, *kinds)}
    found |= {"nn", "functional", "distributions", "linalg", "special", "no_grad", "training", "forward", "children"}
    found |= {"append", "extend", "insert"}  # of lists, which can only be local ones
    made = {name for name in dir(nn) if isinstance(getattr(nn, name), type)}
    return {name for name in found - made - REFUSED if not name.startswith(("_", "set_", "register_"))}


class Reading:
    """What was read of something that is called, and whether it keeps nothing; see NOTE [Keeping nothing]."""

    def __init__(self, what: Any) -> None:
        """Read the code of `what`, a module, a function or another callable object."""
        self._what = what
        self._nodes: list[Any] = []
        """Modules and objects whose attributes the code may reach; it may call them, too."""
        self._used: dict[str, None] = {}
        """Names of attributes that it uses, of whatever."""
        self._read: dict[int, tuple[FunctionType, CodeType]] = {}
        """Functions, and the code that they had."""
        self._bound: list[tuple[Any, str, Any]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._kinds: set[type] = set()
        self._counts: set[str] = set()
        self._prints = False
        self._hooks = RemovableHandle.next_id
        self.counted: list[tuple[dict[str, Any], str]] = []
        """Numbers that the code counts up: where they are kept, and their names there."""
        self.is_librarys = isinstance(what, nn.Module) and all(map(_is_plain, what.modules()))
        """Whether it is all torch's or tensordict's code, so that nothing has to be read."""
        self.keeps_nothing = self.is_librarys or self._is_harmless(what)
        self.only_reads = self.is_librarys and not any(getattr(one, "inplace", False) for one in what.modules())
        """Whether it is known to leave alone what it is given."""
        of_objects = [one for one in self._bound if isinstance(one[0], dict)]
        of_classes = [one for one in self._bound if not isinstance(one[0], dict)]
        looks: list[tuple[Any, Any]] = [(dict.get, of_objects), (MappingProxyType.get, of_classes)]
        looks += [(attrgetter("cell_contents"), self._cells), (attrgetter("__code__"), self._read.values())]
        self._looks: list[Any] = [(look, *zip(*found, strict=True)) for look, found in looks if found]
        """How to look at all that was read in one go: by which function, with which arguments, and what it found."""

    @property
    def modules(self) -> list[nn.Module]:
        """All that the code may reach."""
        return [node for node in self._nodes if isinstance(node, nn.Module)]

    @property
    def may_be_repeated(self) -> bool:
        """Whether a call that writes to no tensor leaves no trace; numpy's arrays may be written to unseen."""
        return self.keeps_nothing and not self.counted and not self._prints and "numpy" not in self._used

    @property
    def has_changed(self) -> bool:
        """Whether a name that was read stands for something else by now."""
        if not self.keeps_nothing:
            return False
        try:
            for look, *given, before in self._looks:
                if not all(map(is_, map(look, *given), before)) and not all(map(_is_alike, map(look, *given), before)):
                    return True
        except ValueError:  # a variable of a function around it has no value any more
            return True
        return not all([type(space.get(name)) in NUMBERS for space, name in self.counted])

    @property
    def is_current(self) -> bool:
        """Whether reading it again would find nothing else: whoever asks need not know that nothing was exchanged."""
        if self._hooks != RemovableHandle.next_id or not self.keeps_nothing or self.has_changed:
            return False
        known = set(map(id, self._nodes))
        return all(id(inner) in known for node in self.modules for inner in node._modules.values() if inner is not None)

    # -- values ------------------------------------------------------------------------------------------------

    def _is_harmless(self, value: Any) -> bool:
        """Whether code may have `value` at hand, and call it, without keeping anything."""
        if is_setting(value) or isinstance(value, PLAIN) or type(value) in (Tensor, nn.Parameter):
            return True
        if isinstance(value, tuple):
            return type(value) is tuple and all(map(self._is_harmless, value))
        if isinstance(value, ModuleType):
            if value not in LIBRARIES and not any(value is known for known in self._nodes):
                self._nodes.append(value)  # a file of the user's: what is taken from there is looked at
                return all(self._may_have(value, name) for name in list(self._used))
            return True
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and any(vars(space).get(name) is value for space in LIBRARIES):
            return name in _names()
        if isinstance(value, FunctionType):
            return self._keeps_none(value)
        if isinstance(value, MethodType):
            return self._is_harmless(value.__self__) and self._is_harmless(value.__func__)
        if isinstance(value, nn.Module):
            return all(map(self._takes, value.modules()))
        return not isinstance(value, type) and hasattr(value, "__dict__") and self._takes(value)

    def _takes(self, node: Any) -> bool:
        """Whether the code may reach `node`, a module or an object, and call it."""
        if any(node is known for known in self._nodes):
            return True
        self._nodes.append(node)
        if not all(self._may_have(node, name) for name in list(self._used)):
            return False
        self._bound += [(vars(node), name, vars(node).get(name)) for name in CALLED]
        for kind in type(node).__mro__:
            if kind not in self._kinds:
                self._kinds.add(kind)
                self._bound += [(vars(kind), name, vars(kind)[name]) for name in CALLED if name in vars(kind)]
        if not isinstance(node, nn.Module):
            call = vars(type(node)).get("__call__")
            return self._is_ordinary(node) and (call is None or self._is_harmless(call))
        if not all(map(self._is_harmless, (*node._forward_hooks.values(), *node._forward_pre_hooks.values()))):
            return False
        if isinstance(node, TensorDictModule):  # which calls what it holds, whoever calls it
            is_read = self._is_harmless(node.module)
            if not is_read or not (node.method is None or self._uses(node.method)):
                return False
        if isinstance(node, ProbabilisticTensorDictModule):
            made = node.distribution_class
            if not _has_plain_settings(node) or not (_is_known_distribution(made) or self._is_harmless(made)):
                return False
        if "forward" in vars(node):
            return self._is_ordinary(node) and self._is_harmless(vars(node)["forward"])
        if acts_as(node) is not None or _is_torchs(node):
            return not isinstance(node, HOLDING)
        return self._is_ordinary(node) and self._is_harmless(type(node).forward)

    def _is_ordinary(self, node: Any) -> bool:
        """Whether its own classes are not called by torch or Python in other ways than those that are read."""
        kinds = [kind for kind in type(node).__mro__ if kind is not object]
        foreign = [kind for kind in kinds if not is_librarys(kind)]
        others = [kind for kind in kinds if is_librarys(kind)]
        if not foreign and not _is_torchs(node):
            return False
        if any(not issubclass(kind, nn.Module) or issubclass(kind, HOLDING) for kind in others):
            return False
        for kind in foreign:
            for name, value in vars(kind).items():
                is_special = name.startswith("__") and name != "__call__"
                if name in NOT_CALLED or name in ("forward", "__qualname__", "__constants__"):
                    continue
                if is_special or (any(hasattr(other, name) for other in others) and not self._is_harmless(value)):
                    return False
        return True

    # -- names -------------------------------------------------------------------------------------------------

    def _uses(self, name: str) -> bool:
        """Whether code may ask for the attribute `name`, of whatever it is asked for."""
        if name in self._used:
            return True
        self._used[name] = None
        if name in REFUSED or name.startswith("__"):
            return False
        # More nodes may be found meanwhile: these look at all names themselves.
        nodes = list(self._nodes)
        return all(self._may_have(node, name) for node in nodes) and (
            name in _names() or any(_has(node, name) for node in nodes)
        )

    def _may_have(self, node: Any, name: str) -> bool:
        """Whether what `node` has under `name`, if anything, is harmless."""
        if isinstance(node, nn.Module) and _holds(node, name):
            return True  # all modules are looked at, and tensors are harmless
        own = vars(node)
        if name in self._counts and name in own:
            self.counted.append((own, name))
            return type(own[name]) in NUMBERS
        if name in own or not is_librarys(type(node)):
            self._bound.append((own, name, own.get(name)))
            if not self._is_harmless(own.get(name)):
                return False
        for kind in type(node).__mro__:
            if name in vars(kind) and not is_librarys(kind):
                value = vars(kind)[name]
                self._bound.append((vars(kind), name, value))
                if not self._is_harmless(
                    value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                ):
                    return False
        return True

    # -- code --------------------------------------------------------------------------------------------------

    def _keeps_none(self, function: FunctionType) -> bool:
        """Whether `function` only does what keeps nothing."""
        if id(function) in self._read:
            return True
        code = function.__code__
        self._read[id(function)] = function, code
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if code is NO_GRAD:  # as `torch.no_grad()` and its like make of a function
            context = getattr(cells["ctx_factory"].cell_contents, "__self__", None)
            is_known = isinstance(context, torch.no_grad | torch.inference_mode)
            return is_known and self._is_harmless(cells["func"].cell_contents)
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for name, cell in cells.items():
            if name != "__class__":
                try:
                    values.append(cell.cell_contents)
                except ValueError:  # it is empty as yet
                    return False
                self._cells.append((cell, values[-1]))
        if not all(map(self._is_harmless, values)):
            return False
        codes = [code]
        for one in codes:  # which grows
            codes += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
            steps = [step for step in dis.get_instructions(one) if step.opname not in ("CACHE", "EXTENDED_ARG")]
            data = _data(steps, one, self._given_data(function) if one is code else ())
            if not all(self._is_known(steps, place, function, data) for place in range(len(steps))):
                return False
        return True

    def _is_known(
        self, steps: list[dis.Instruction], place: int, function: FunctionType, data: Collection[str]
    ) -> bool:
        name, value = steps[place].opname, steps[place].argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            return self._is_known_name(value, function)
        if name in ATTRIBUTES:
            before = steps[place - 1]
            is_data = before.opname == "LOAD_FAST" and before.argval in data
            return (value not in CONVERSIONS or is_data or _is_arithmetic(before)) and self._uses(value)
        if name == "STORE_ATTR":
            return self._counts_up(steps[max(0, place - 4) : place], value)
        if name == "STORE_DEREF":
            return value not in function.__code__.co_freevars
        return name.startswith(KNOWN_STEPS) or name.startswith(MORE_STEPS)

    def _is_known_name(self, name: str, function: FunctionType) -> bool:
        space = function.__globals__
        self._bound.append((space, name, space.get(name)))
        if name in space:
            return self._is_harmless(space[name])
        found = getattr(builtins, name, None)
        self._prints = self._prints or name == "print"
        return name in KEPT_BUILTINS or (isinstance(found, type) and issubclass(found, Exception))

    def _given_data(self, function: FunctionType) -> tuple[str, ...]:
        """The arguments of `function` that are no modules: those that torch gives to a forward, and we to a policy."""
        code = function.__code__
        names = code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]
        if function is self._what:
            return names
        return names[1:] if function in _given_tensors(self._what) else ()

    def _counts_up(self, before: list[dis.Instruction], name: str) -> bool:
        """Whether the attribute `name` is set to itself and a number: it stays one if it is one now."""
        if name in _names() or len(before) < 4 or (before[0].opname, before[0].argval) != ("LOAD_ATTR", name):
            return False
        is_sum = before[2].opname.startswith(("BINARY_OP", "INPLACE_")) and before[3].opname in ("SWAP", "ROT_TWO")
        if not is_sum or not before[1].opname.startswith("LOAD_") or type(before[1].argval) not in NUMBERS:
            return False
        if name not in self._counts:
            self._counts.add(name)
            owners = [vars(node) for node in self._nodes if name in vars(node)]
            self._bound = [(s, n, v) for s, n, v in self._bound if n != name or not any(s is own for own in owners)]
            self.counted += [(own, name) for own in owners]
        return bool(self.counted) and all(type(own[kept]) in NUMBERS for own, kept in self.counted)


def _given_tensors(what: Any) -> set[Any]:
    """The methods in `what` that are given tensors by us, or by torch; what users give to theirs may be a layer."""
    if not isinstance(what, nn.Module):
        owner = getattr(what, "__self__", None)
        return {getattr(what, "__func__", None), *(_forwards(owner) if isinstance(owner, nn.Module) else ())}
    found, by_users = _forwards(what), set[Any]()
    for one in what.modules():
        inner = set(chain.from_iterable(map(_forwards, one.children())))
        if isinstance(one, nn.Sequential | TensorDictModule):
            found |= inner
        elif not is_librarys(type(one)):
            by_users |= inner
        if isinstance(one, TensorDictModule) and one.method is not None:
            found.add(getattr(type(one.module), one.method, None))
    return found - by_users


def _forwards(module: nn.Module) -> set[Any]:
    """Its own, and those that this one may call by `super()`."""
    return {vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)}


def _data(steps: list[dis.Instruction], code: CodeType, given: Collection[str]) -> set[str]:
    """The locals of `code` that are no modules: those that are `given`, and what arithmetic or a conversion makes."""
    stored: dict[str, list[bool]] = {name: [] for name in given}
    for at, step in enumerate(steps):
        if step.opname.startswith("STORE_FAST"):
            is_plain = step.opname == "STORE_FAST" and not step.is_jump_target
            is_made = is_plain and (_is_arithmetic(steps[at - 1]) or _converts(steps[:at]))
            for name in [step.argval] if isinstance(step.argval, str) else step.argval:
                stored.setdefault(name, []).append(is_made)
    others = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - set(given)
    return {name for name, made in stored.items() if all(made) and name not in others}


def _converts(steps: list[dis.Instruction]) -> bool:
    """Whether the last of `steps` is the call of a conversion, which is looked at by itself."""
    asked = [at for at, step in enumerate(steps) if step.opname in ATTRIBUTES and step.argval in CONVERSIONS]
    calls = [at for at, step in enumerate(steps) if step.opname.startswith("CALL") and asked and at > asked[-1]]
    return calls == [len(steps) - 1]


def _is_arithmetic(step: dis.Instruction) -> bool:
    """Whether it combines two values by an operator; not by a subscript, which may give a layer."""
    return step.opname.startswith(("BINARY_", "INPLACE_")) and "SUBSCR" not in step.opname and "[" not in step.argrepr


def _is_alike(now: Any, before: Any) -> bool:
    """Whether a name stands for the same, or for another setting of the same kind, which makes nobody keep anything."""
    return now is before or (type(now) is type(before) and is_setting(now) and is_setting(before))


NO_GRAD: CodeType = torch.no_grad()(lambda: None).__code__
"""That of each function that such a context has decorated."""


def _has(node: Any, name: str) -> bool:
    """Whether `node` or one of its own classes has something called `name`."""
    if name in vars(node) or (isinstance(node, nn.Module) and _holds(node, name)):
        return True
    return any(name in vars(kind) for kind in type(node).__mro__ if not is_librarys(kind))


def _holds(module: nn.Module, name: str) -> bool:
    return name in module._modules or name in module._parameters or name in module._buffers


def is_librarys(kind: Any) -> bool:
    """Whether a class is Python's, torch's or tensordict's."""
    return (kind.__module__ or "").partition(".")[0] in (
        "torch",
        "tensordict",
        "builtins",
        "typing",
        "abc",
        "collections",
    )


def _is_torchs(module: Any) -> bool:
    return (type(module).__module__ or "").startswith("torch.nn.modules.")


def _is_plain(module: Any) -> bool:
    """Whether all that a call of `module` does by itself is torch's or tensordict's code."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    kind = acts_as(module)
    if kind is ProbabilisticTensorDictModule:
        return _is_known_distribution(module.distribution_class) and _has_plain_settings(module)
    if kind is TensorDictModule:
        return isinstance(module.module, nn.Module) and module.method is None
    return kind is not None or _is_torchs(module)


def _is_known_distribution(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__.startswith(("torch.distributions.", "swath.", "torchrl."))


def _has_plain_settings(module: ProbabilisticTensorDictModule) -> bool:
    settings = (module.distribution_kwargs or {}).values()
    return all(isinstance(value, bool | int | float | str | Tensor | None) for value in settings)


def has_numbers_alone(module: ProbabilisticTensorDictModule) -> bool:
    """Whether the settings of its distribution are of no shape, so that they fit any number of frames."""
    settings = (module.distribution_kwargs or {}).values()
    return all(isinstance(value, bool | int | float | str | None) for value in settings)
