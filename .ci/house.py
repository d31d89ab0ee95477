"""The rules of the house that no linter knows; run by `make check`, which fails where one is broken.

- No private attribute of another module's objects, and no private name imported from another module.
- No class name and no file name twice in the library, apart from `SAME_NAMES`.
- No tensor made where the user's default device would decide: `MAKERS` of torch are told where.
- No file of the library over `LONGEST` lines; library and tests no longer than `SIZES`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST = 450
SIZES = {"swath": 37_760, "tests": 43_920}
"""Lines in all: what there is now. They go up only with something new for users, and by no more than that takes."""
SAME_NAMES = {
    "__init__.py": "packages",
    "utils.py": "torchrl.envs.utils and torchrl.collectors.utils, which users of TorchRL import",
}
THIRD_PARTY = {
    "atexit": "_clear _run_exitfuncs",
    "envpool": "_reset",
    "gymnasium.wrappers": "_elapsed_steps _has_reset _max_episode_steps",
    "multiprocessing": "_children _exit_function _finalizer_registry _resource_tracker _stop",
    "os": "_exit",
    "subprocess": "_args_from_interpreter_flags",
    "sys": "_getframe",
    "tensordict": "_generator _generator_key _interaction_type _kwargs _mode _new_unsafe",
    "threading.RLock": "_is_owned",
    "torch": "_C _is_any_autocast_enabled _set_grad_enabled",
    "torch.distributed": "_Options _devices _timeout",
    "torch.distributed.autograd": "_init",
    "torch.distributed.rpc": (
        "_init_rpc_states _is_current_rpc_agent_set _reset_current_rpc_agent _update_group_membership"
    ),
    "torch.Tensor": "_version",
    "torch._ops.OpOverload": "_schema",
    "torch.nn.Module": (
        "_buffers _forward_hooks _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks _modules "
        "_orig_mod _parameters"
    ),
    "torchrl.modules.MLP": "_reshape_out",
    "torch.nn.modules": "_NormBase _global_forward_hooks _global_forward_pre_hooks",
    "weakref.finalize": "_exitfunc _registry",
}
"""Private attributes of others that there is no public way to."""
ALLOWED = {name for names in THIRD_PARTY.values() for name in names.split()}
MAKERS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
"""Functions of torch whose result lies on the process's default device if they are not told where."""
Finding = tuple[Path, int, str]


def is_private(name: str) -> bool:
    """Whether it begins with one underscore."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def is_own(of: ast.expr) -> bool:
    """Whether it is `self`, `cls` or `super()`."""
    if isinstance(of, ast.Call):
        return isinstance(of.func, ast.Name) and of.func.id == "super"
    return isinstance(of, ast.Name) and of.id in ("self", "cls")


def used_attribute(node: ast.AST) -> tuple[ast.expr, str] | None:
    """Object and name of an attribute, also where it is got by `getattr` or its like."""
    match node:
        case ast.Attribute():
            return node.value, node.attr
        case ast.Call(
            func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"),
            args=[of, ast.Constant(value=str(name)), *_],
        ):
            return of, name
    return None


def own_names(tree: ast.Module) -> set[str]:
    """Names that the module defines, or gives to objects of its own classes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return found


def foreign_privates(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Private attributes of objects of other modules, and private names of other modules of the library."""
    own = own_names(tree)
    for node in ast.walk(tree):
        if (used := used_attribute(node)) is not None:
            of, name = used
            if is_private(name) and not is_own(of) and name not in own | ALLOWED:
                yield path, of.lineno, f"{ast.unparse(of)}.{name} is private to another module"
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("swath")):
            for alias in node.names:
                if is_private(alias.name):
                    yield path, node.lineno, f"{alias.name} is private to {node.module}"


def undecided_devices(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Tensors that are made without saying where."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in MAKERS:
                if not any(keyword.arg == "device" for keyword in node.keywords):
                    yield path, node.lineno, f"torch.{name} names no device: the user's default would decide"


def repeated_names(places: dict[str, list[tuple[Path, int]]], what: str) -> Iterator[Finding]:
    """What exists more than once."""
    for name, where in places.items():
        for path, line in where[1:]:
            yield path, line, f"the {what} {name} exists already in {where[0][0]}:{where[0][1]}"


def findings(root: Path) -> Iterator[Finding]:
    """Everything under `root` that breaks a rule."""
    classes: dict[str, list[tuple[Path, int]]] = {}
    files: dict[str, list[tuple[Path, int]]] = {}
    for folder, most in SIZES.items():
        texts = {path.relative_to(root): path.read_text() for path in sorted((root / folder).rglob("*.py"))}
        if (total := sum(len(text.splitlines()) for text in texts.values())) > most:
            yield Path(folder), 1, f"has {total:,} lines, {total - most:,} more than {most:,}"
        for path, text in texts.items() if folder == "swath" else ():
            if (count := len(text.splitlines())) > LONGEST:
                yield path, count, f"has {count} lines, more than {LONGEST}"
            if path.name not in SAME_NAMES:
                files.setdefault(path.name, []).append((path, 1))
            tree = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, []).append((path, node.lineno))
            yield from foreign_privates(path, tree)
            yield from undecided_devices(path, tree)
    yield from repeated_names(classes, "class")
    yield from repeated_names(files, "file")


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    found = [f"{path}:{line}: {what}" for path, line, what in findings(root)]
    print("\n".join(found) or "The house is in order.")
    sys.exit(bool(found))
