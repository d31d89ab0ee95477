"""What is recorded step by step ends up in the columns, however rows lie in memory and however many steps there are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swath.envs.rows import Leaf, Rows
from swath.rollout import record
from swath.rollout.record import copies_of, joined
from swath.runtime.columns import Columns

DTYPES = [torch.bool, torch.uint8, torch.float32, torch.int64, torch.float64]
LEAVES = st.builds(Leaf, st.lists(st.integers(0, 3), max_size=2).map(tuple), st.sampled_from(DTYPES))


def numbered(array: np.ndarray, t: int) -> np.ndarray:
    """Other numbers in each place and step."""
    values = (np.arange(array.size).reshape(array.shape) * 7 + t * 13) % 251
    return (values % 2 if array.dtype == bool else values).astype(array.dtype)


def recorded(
    rows: Rows,
    columns: dict[str, np.ndarray],
    steps: int,
    made: int,
    pieces: list[np.ndarray | None],
    whole: np.ndarray | None = None,
) -> int:
    """Fill `columns` with `made` of `steps` steps; how many copies that takes in each."""
    copies, layouts = copies_of([(columns[key], rows.arrays[key]) for key in columns], steps, pieces, whole)
    for t in range(made):
        for array in rows.arrays.values():
            array[...] = numbered(array, t)
        for target, row in copies:
            target[t] = row
    for layout in layouts:
        layout.finish(made)
    for key, column in columns.items():
        for t in range(made):
            np.testing.assert_array_equal(column[:, t], numbered(rows.arrays[key], t), f"{key} in step {t}")
        assert not column[:, made:].any(), key
    return len(copies)


@given(
    st.lists(LEAVES, min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 9),
    st.data(),
    st.booleans(),
    st.booleans(),
)
def test_all_steps_get_to_their_columns(
    leaves: list[Leaf], lanes: int, steps: int, data: st.DataObject, is_one_piece: bool, is_cut: bool
) -> None:
    named = {f"e{i}": leaf for i, leaf in enumerate(leaves)}
    rows = Rows(named, (lanes,))
    wide = Columns(named, (lanes, steps + 2)).tensors
    columns = {
        key: tensor.numpy()[:, 1:-1] if is_cut else Columns({key: named[key]}, (lanes, steps)).tensors[key].numpy()
        for key, tensor in wide.items()
        if data.draw(st.booleans(), key)
    }
    made = data.draw(st.integers(0, steps))
    recorded(rows, columns, steps, made, [rows.piece] if is_one_piece else [])


@given(st.lists(LEAVES, min_size=1, max_size=6), st.integers(1, 5), st.data())
def test_one_step_gets_to_its_columns_and_nowhere_else(leaves: list[Leaf], lanes: int, data: st.DataObject) -> None:
    """Whatever lies between the columns that are written, and in whichever order."""
    named = {f"e{i}": leaf for i, leaf in enumerate(leaves)}
    rows = Rows(named, (lanes,))
    others = {f"other{i}": leaf for i, leaf in enumerate(data.draw(st.lists(LEAVES, max_size=3)))}
    order = data.draw(st.permutations([*named, *others]))
    slot = Columns({key: (named | others)[key] for key in order}, (lanes, 1))
    wanted = [key for key in named if data.draw(st.booleans(), key)]
    untouched = {key: tensor.numpy() for key, tensor in slot.tensors.items() if key not in wanted}
    for array in untouched.values():
        array[...] = numbered(array, 5)
    recorded(rows, {key: slot.tensors[key].numpy() for key in wanted}, 1, 1, [rows.piece], slot.piece)
    for key, array in untouched.items():
        np.testing.assert_array_equal(array, numbered(array, 5), key)


def test_one_step_is_one_copy_where_columns_lie_as_its_rows_do() -> None:
    leaves = {key: Leaf((2,), torch.float32) for key in "klmn"}
    rows, slot = Rows(leaves, (3,)), Columns(leaves, (3, 1))
    columns = {key: tensor.numpy() for key, tensor in slot.tensors.items()}
    assert recorded(rows, columns, 1, 1, [rows.piece], slot.piece) == 1
    assert recorded(rows, {key: columns[key] for key in "kln"}, 1, 1, [rows.piece], slot.piece) == 2
    turned = Columns({key: leaves[key] for key in "lknm"}, (3, 1))
    columns = {key: tensor.numpy() for key, tensor in turned.tensors.items()}
    assert recorded(rows, columns, 1, 1, [rows.piece], turned.piece) == 4


@given(st.lists(LEAVES, min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 4), st.data())
def test_columns_that_are_joined_hold_what_they_do_alone(
    leaves: list[Leaf], lanes: int, steps: int, data: st.DataObject
) -> None:
    slot = Columns({f"e{i}": leaf for i, leaf in enumerate(leaves)}, (lanes, steps))
    chosen = [tensor.numpy() for tensor in slot.tensors.values() if tensor.numel() and data.draw(st.booleans())]
    for number, column in enumerate(chosen):
        column[...] = number + 1
    assert slot.piece is not None
    found = joined(chosen, slot.piece)
    assert len(found) <= len(chosen)
    assert sum(float(one.sum(dtype=float)) for one in found) == sum(float(one.sum(dtype=float)) for one in chosen)
    assert sum(np.count_nonzero(one) for one in found) == sum(one.size for one in chosen)


def test_rows_that_lie_next_to_each_other_are_one_copy() -> None:
    leaves = {
        "observation": Leaf((4,), torch.float32),
        "reward": Leaf((1,), torch.float32),
        "done": Leaf((), torch.bool),
    }
    rows = Rows(leaves, (3,))
    columns = {key: tensor.numpy() for key, tensor in Columns(leaves, (3, 8)).tensors.items()}
    assert recorded(rows, columns, 8, 8, [rows.piece]) == 1
    assert recorded(rows, columns, 8, 8, []) == 3


def test_what_is_large_or_soon_over_goes_to_its_column_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = {"small": Leaf((), torch.float32), "pixels": Leaf((64, 64, 4), torch.uint8), "last": Leaf((), torch.bool)}
    rows = Rows(leaves, (3,))
    columns = {key: tensor.numpy() for key, tensor in Columns(leaves, (3, 8)).tensors.items()}
    pairs = [(columns[key], rows.arrays[key]) for key in columns]
    copies, layouts = copies_of(pairs, 8, [rows.piece])
    assert len(copies) == 3
    assert len(layouts) == 2
    assert recorded(rows, {"pixels": columns["pixels"]}, 8, 5, [rows.piece]) == 1
    assert copies_of([(column[:, :2], row) for column, row in pairs], 2, [rows.piece])[1] == []
    monkeypatch.setattr(record, "MAX_RECORD", 64)
    assert len(copies_of(pairs, 8, [rows.piece])[1]) == 1


def test_an_entry_that_was_exchanged_lies_elsewhere() -> None:
    leaves = {"a": Leaf((2,), torch.float32), "b": Leaf((), torch.float32)}
    rows = Rows(leaves, (3,))
    rows.add("a", torch.zeros(3, 5))
    columns = {"a": np.zeros((3, 6, 5), np.float32), "b": np.zeros((3, 6), np.float32)}
    assert recorded(rows, columns, 6, 6, [rows.piece]) == 2
