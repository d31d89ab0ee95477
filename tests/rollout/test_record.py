"""What is recorded step by step ends up in the columns, however rows lie in memory and however many steps there are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swath.envs.rows import Leaf, Rows
from swath.rollout import record
from swath.rollout.record import copies_of
from swath.runtime.columns import Columns

DTYPES = [torch.bool, torch.uint8, torch.float32, torch.int64, torch.float64]
LEAVES = st.builds(Leaf, st.lists(st.integers(0, 3), max_size=2).map(tuple), st.sampled_from(DTYPES))


def numbered(array: np.ndarray, t: int) -> np.ndarray:
    """Other numbers in each place and step."""
    values = (np.arange(array.size).reshape(array.shape) * 7 + t * 13) % 251
    return (values % 2 if array.dtype == bool else values).astype(array.dtype)


def recorded(rows: Rows, columns: dict[str, np.ndarray], steps: int, made: int, pieces: list[np.ndarray | None]) -> int:
    """Fill `columns` with `made` of `steps` steps; how many copies that takes in each."""
    copies, layouts = copies_of([(columns[key], rows.arrays[key]) for key in columns], steps, pieces)
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
